import tilelang.language as T

T.make_tensor(T.ptr(), (4,))
