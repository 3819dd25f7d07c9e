import tilelang.language as T

space = {}
exec("def f(A: None): pass", space)
T.prim_func(space["f"])
