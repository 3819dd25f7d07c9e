import tilelang.distributed as dist

print(dist.rank())
