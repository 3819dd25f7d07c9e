from tilelang.distributed import host

me = host._Rank(0, 2, None, None, None, [3, 12, 520, 4, 3, 7], names={0: "x", 512: "the counts of the barriers"})
host._current.append(me)
try:
    raise host.stopped()
finally:
    host._current.clear()
