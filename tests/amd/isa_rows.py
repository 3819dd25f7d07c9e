"""The instructions of gfx90a, gfx942 and gfx950 that the interpreter knows, by encoding format.

Sources: "AMD Instinct MI200" and "AMD Instinct MI300" and "AMD Instinct CDNA4" Instruction Set Architecture Reference Guides,
chapters "Instructions" (opcode numbers, pseudo code) and "Microcode Formats" (fields, the offsets of VOP1 and VOP2 opcodes in
VOP3).  test_isa_encodings.py compares numbers, names and operands with LLVM's disassembler.

A row is `opcode name operands | meaning | scc`, with `@chips` behind the name if not all have it; rows are separated by ` ; `.
The operands are the types of the destination and of the sources; their sizes give the numbers of registers.  Types: u i f with
16, 32 or 64 bits; `m` a mask of lanes in a pair of scalar registers; `k` a literal constant within the instruction; `p` two
floats of 32 bits; `h`, `I`, `U` two numbers of 16 bits (float, signed, unsigned), halves by op_sel; `x` a float of 32 or
16 bits as op_sel_hi says; `a` an accumulation register; `s` a scalar one; `-` none.
Meanings are Python expressions of a, b, c (sources) and d (the old destination), for vector rows arrays over the lanes, for
scalar rows integers without sign (`s(x)` is x with its sign); names of functions are those of isa_arithmetic.py.  Scalar rows
give the new condition code after the second bar, of the result r before it is cut to its size.  Rows without a meaning stand
by name in isa_compile.py.
"""

SOP2 = """
0 add_u32 u32 u32 u32 | a + b | r >> 32 ; 1 sub_u32 u32 u32 u32 | a - b | b > a
2 add_i32 u32 u32 u32 | a + b | s(a) + s(b) != s(r) ; 3 sub_i32 u32 u32 u32 | a - b | s(a) - s(b) != s(r)
4 addc_u32 u32 u32 u32 | a + b + scc | r >> 32 ; 5 subb_u32 u32 u32 u32 | a - b - scc | r < 0
6 min_i32 u32 u32 u32 | min(a, b, key=s) | s(a) < s(b) ; 7 min_u32 u32 u32 u32 | min(a, b) | a < b
8 max_i32 u32 u32 u32 | max(a, b, key=s) | s(a) > s(b) ; 9 max_u32 u32 u32 u32 | max(a, b) | a > b
10 cselect_b32 u32 u32 u32 | a if scc else b ; 11 cselect_b64 u64 u64 u64 | a if scc else b
12 and_b32 u32 u32 u32 | a & b | r != 0 ; 13 and_b64 u64 u64 u64 | a & b | r != 0 ; 14 or_b32 u32 u32 u32 | a \\| b | r != 0
15 or_b64 u64 u64 u64 | a \\| b | r != 0 ; 16 xor_b32 u32 u32 u32 | a ^ b | r != 0 ; 17 xor_b64 u64 u64 u64 | a ^ b | r != 0
18 andn2_b32 u32 u32 u32 | a & ~b | r != 0 ; 19 andn2_b64 u64 u64 u64 | a & ~b | r != 0
20 orn2_b32 u32 u32 u32 | a \\| b ^ M32 | r != 0 ; 21 orn2_b64 u64 u64 u64 | a \\| b ^ M64 | r != 0
22 nand_b32 u32 u32 u32 | a & b ^ M32 | r != 0 ; 23 nand_b64 u64 u64 u64 | a & b ^ M64 | r != 0
24 nor_b32 u32 u32 u32 | (a \\| b) ^ M32 | r != 0 ; 25 nor_b64 u64 u64 u64 | (a \\| b) ^ M64 | r != 0
26 xnor_b32 u32 u32 u32 | a ^ b ^ M32 | r != 0 ; 27 xnor_b64 u64 u64 u64 | a ^ b ^ M64 | r != 0
28 lshl_b32 u32 u32 u32 | a << (b & 31) | r & M32 != 0 ; 29 lshl_b64 u64 u64 u32 | a << (b & 63) | r & M64 != 0
30 lshr_b32 u32 u32 u32 | a >> (b & 31) | r != 0 ; 31 lshr_b64 u64 u64 u32 | a >> (b & 63) | r != 0
32 ashr_i32 u32 u32 u32 | s(a) >> (b & 31) | r != 0 ; 33 ashr_i64 u64 u64 u32 | s64(a) >> (b & 63) | r != 0
34 bfm_b32 u32 u32 u32 | ((1 << (a & 31)) - 1) << (b & 31) ; 35 bfm_b64 u64 u32 u32 | ((1 << (a & 63)) - 1) << (b & 63)
36 mul_i32 u32 u32 u32 | a * b ; 37 bfe_u32 u32 u32 u32 | field(a, b & 31, b >> 16 & 127) | r != 0
38 bfe_i32 u32 u32 u32 | signed_field(a, b & 31, b >> 16 & 127) | r != 0
39 bfe_u64 u64 u64 u32 | field(a, b & 63, b >> 16 & 127) | r != 0
40 bfe_i64 u64 u64 u32 | signed_field(a, b & 63, b >> 16 & 127) | r != 0
42 absdiff_i32 u32 u32 u32 | abs(s(a) - s(b)) | r != 0 ; 44 mul_hi_u32 u32 u32 u32 | a * b >> 32
45 mul_hi_i32 u32 u32 u32 | s(a) * s(b) >> 32 ; 46 lshl1_add_u32 u32 u32 u32 | (a << 1) + b | r >> 32 != 0
47 lshl2_add_u32 u32 u32 u32 | (a << 2) + b | r >> 32 != 0 ; 48 lshl3_add_u32 u32 u32 u32 | (a << 3) + b | r >> 32 != 0
49 lshl4_add_u32 u32 u32 u32 | (a << 4) + b | r >> 32 != 0 ; 50 pack_ll_b32_b16 u32 u32 u32 | a & 0xffff \\| b << 16
51 pack_lh_b32_b16 u32 u32 u32 | a & 0xffff \\| b & 0xffff0000 ; 52 pack_hh_b32_b16 u32 u32 u32 | a >> 16 \\| b & 0xffff0000
"""
SOP1 = """
0 mov_b32 u32 u32 | a ; 1 mov_b64 u64 u64 | a ; 2 cmov_b32 u32 u32 | a if scc else d ; 3 cmov_b64 u64 u64 | a if scc else d
4 not_b32 u32 u32 | a ^ M32 | r != 0 ; 5 not_b64 u64 u64 | a ^ M64 | r != 0 ; 8 brev_b32 u32 u32 | int(f"{a:032b}"[::-1], 2)
9 brev_b64 u64 u64 | int(f"{a:064b}"[::-1], 2) ; 10 bcnt0_i32_b32 u32 u32 | 32 - a.bit_count() | r != 0
11 bcnt0_i32_b64 u32 u64 | 64 - a.bit_count() | r != 0 ; 12 bcnt1_i32_b32 u32 u32 | a.bit_count() | r != 0
13 bcnt1_i32_b64 u32 u64 | a.bit_count() | r != 0 ; 14 ff0_i32_b32 u32 u32 | lowest(a ^ M32)
15 ff0_i32_b64 u32 u64 | lowest(a ^ M64) ; 16 ff1_i32_b32 u32 u32 | lowest(a) ; 17 ff1_i32_b64 u32 u64 | lowest(a)
18 flbit_i32_b32 u32 u32 | 32 - a.bit_length() if a else -1 ; 19 flbit_i32_b64 u32 u64 | 64 - a.bit_length() if a else -1
20 flbit_i32 u32 u32 | sign_run(a, 32) ; 21 flbit_i32_i64 u32 u64 | sign_run(a, 64)
22 sext_i32_i8 u32 u32 | signed_field(a, 0, 8) ; 23 sext_i32_i16 u32 u32 | signed_field(a, 0, 16)
24 bitset0_b32 u32 u32 | d & ~(1 << (a & 31)) ; 25 bitset0_b64 u64 u32 | d & ~(1 << (a & 63))
26 bitset1_b32 u32 u32 | d \\| 1 << (a & 31) ; 27 bitset1_b64 u64 u32 | d \\| 1 << (a & 63) ; 28 getpc_b64 u64 -
29 setpc_b64 - u64 ; 30 swappc_b64 u64 u64 ; 32 and_saveexec_b64 u64 u64 | a & x ; 33 or_saveexec_b64 u64 u64 | a \\| x
34 xor_saveexec_b64 u64 u64 | a ^ x ; 35 andn2_saveexec_b64 u64 u64 | a & ~x ; 36 orn2_saveexec_b64 u64 u64 | a \\| x ^ M64
37 nand_saveexec_b64 u64 u64 | a & x ^ M64 ; 38 nor_saveexec_b64 u64 u64 | (a \\| x) ^ M64
39 xnor_saveexec_b64 u64 u64 | a ^ x ^ M64 ; 48 abs_i32 u32 u32 | abs(s(a)) | r != 0 ; 51 andn1_saveexec_b64 u64 u64 | ~a & x
52 orn1_saveexec_b64 u64 u64 | a ^ M64 \\| x ; 53 andn1_wrexec_b64 u64 u64 | ~a & x ; 54 andn2_wrexec_b64 u64 u64 | a & ~x
55 bitreplicate_b64_b32 u64 u32 | int("".join(2 * bit for bit in f"{a:032b}"), 2)
"""
SOPC = """
0 cmp_eq_i32 u32 u32 | a == b ; 1 cmp_lg_i32 u32 u32 | a != b ; 2 cmp_gt_i32 u32 u32 | s(a) > s(b)
3 cmp_ge_i32 u32 u32 | s(a) >= s(b) ; 4 cmp_lt_i32 u32 u32 | s(a) < s(b) ; 5 cmp_le_i32 u32 u32 | s(a) <= s(b)
6 cmp_eq_u32 u32 u32 | a == b ; 7 cmp_lg_u32 u32 u32 | a != b ; 8 cmp_gt_u32 u32 u32 | a > b ; 9 cmp_ge_u32 u32 u32 | a >= b
10 cmp_lt_u32 u32 u32 | a < b ; 11 cmp_le_u32 u32 u32 | a <= b ; 12 bitcmp0_b32 u32 u32 | not a >> (b & 31) & 1
13 bitcmp1_b32 u32 u32 | a >> (b & 31) & 1 ; 14 bitcmp0_b64 u64 u32 | not a >> (b & 63) & 1
15 bitcmp1_b64 u64 u32 | a >> (b & 63) & 1
17 set_gpr_idx_on u32 k ; 18 cmp_eq_u64 u64 u64 | a == b ; 19 cmp_lg_u64 u64 u64 | a != b
"""
SOPK = """
0 movk_i32 u32 k | b ; 1 cmovk_i32 u32 k | b if scc else d ; 2 cmpk_eq_i32 - k | d == b & M32
3 cmpk_lg_i32 - k | d != b & M32 ; 4 cmpk_gt_i32 - k | s(d) > b ; 5 cmpk_ge_i32 - k | s(d) >= b ; 6 cmpk_lt_i32 - k | s(d) < b
7 cmpk_le_i32 - k | s(d) <= b ; 8 cmpk_eq_u32 - k | d == b & 0xffff ; 9 cmpk_lg_u32 - k | d != b & 0xffff
10 cmpk_gt_u32 - k | d > b & 0xffff ; 11 cmpk_ge_u32 - k | d >= b & 0xffff ; 12 cmpk_lt_u32 - k | d < b & 0xffff
13 cmpk_le_u32 - k | d <= b & 0xffff ; 14 addk_i32 u32 k | d + b | s(d) + b != s(r) ; 15 mulk_i32 u32 k | d * b
17 getreg_b32 u32 k ; 18 setreg_b32 - k ; 20 setreg_imm32_b32 - k
"""
SOPP = """
0 nop ; 1 endpgm ; 2 branch ; 4 cbranch_scc0 ; 5 cbranch_scc1 ; 6 cbranch_vccz ; 7 cbranch_vccnz ; 8 cbranch_execz
9 cbranch_execnz ; 10 barrier ; 12 waitcnt ; 13 sethalt ; 14 sleep ; 15 setprio ; 18 trap ; 19 icache_inv ; 28 set_gpr_idx_off
"""
SMEM = """
0 load_dword 1 ; 1 load_dwordx2 2 ; 2 load_dwordx4 4 ; 3 load_dwordx8 8 ; 4 load_dwordx16 16 ; 8 buffer_load_dword 1
9 buffer_load_dwordx2 2 ; 10 buffer_load_dwordx4 4 ; 11 buffer_load_dwordx8 8 ; 12 buffer_load_dwordx16 16 ; 32 dcache_inv 0
33 dcache_wb 0 ; 36 memtime 2 ; 37 memrealtime 2
"""
VOP2 = """
0 cndmask_b32 u32 u32 u32 m | where(c, b, a) ; 1 add_f32 f32 f32 f32 | a + b ; 2 sub_f32 f32 f32 f32 | a - b
3 subrev_f32 f32 f32 f32 | b - a ; 4 fmac_f64 f64 f64 f64 | fma(a, b, d) ; 5 mul_f32 f32 f32 f32 | a * b
6 mul_i32_i24 i32 u32 u32 | i24(a) * i24(b) ; 7 mul_hi_i32_i24 i32 u32 u32 | i24(a) * i24(b) >> 32
8 mul_u32_u24 u32 u32 u32 | u24(a) * u24(b) ; 9 mul_hi_u32_u24 u32 u32 u32 | u24(a) * u24(b) >> U64(32)
10 min_f32 f32 f32 f32 | fmin(a, b) ; 11 max_f32 f32 f32 f32 | fmax(a, b) ; 12 min_i32 i32 i32 i32 | minimum(a, b)
13 max_i32 i32 i32 i32 | maximum(a, b) ; 14 min_u32 u32 u32 u32 | minimum(a, b) ; 15 max_u32 u32 u32 u32 | maximum(a, b)
16 lshrrev_b32 u32 u32 u32 | b >> (a & 31) ; 17 ashrrev_i32 i32 u32 i32 | b >> (a & 31).astype(I32)
18 lshlrev_b32 u32 u32 u32 | b << (a & 31) ; 19 and_b32 u32 u32 u32 | a & b ; 20 or_b32 u32 u32 u32 | a \\| b
21 xor_b32 u32 u32 u32 | a ^ b ; 22 mac_f32 @90a f32 f32 f32 | a * b + d
22 dot2c_f32_bf16 @950 f32 u32 u32 | dot2_bf16(a, b, d) ; 23 madmk_f32 @90a f32 f32 k f32 | a * b + c
24 madak_f32 @90a f32 f32 f32 k | a * b + c ; 23 fmamk_f32 @942,950 f32 f32 k f32 | fma(a, b, c)
24 fmaak_f32 @942,950 f32 f32 f32 k | fma(a, b, c) ; 25 add_co_u32 u32 m u32 u32 | carry(U64(0) + a + b)
26 sub_co_u32 u32 m u32 u32 | (a - b, b > a) ; 27 subrev_co_u32 u32 m u32 u32 | (b - a, a > b)
28 addc_co_u32 u32 m u32 u32 m | carry(U64(0) + a + b + c) ; 29 subb_co_u32 u32 m u32 u32 m | (a - b - c, b + U64(0) + c > a)
30 subbrev_co_u32 u32 m u32 u32 m | (b - a - c, a + U64(0) + c > b) ; 31 add_f16 f16 f16 f16 | a + b
32 sub_f16 f16 f16 f16 | a - b ; 33 subrev_f16 f16 f16 f16 | b - a ; 34 mul_f16 f16 f16 f16 | a * b
35 mac_f16 f16 f16 f16 | a * b + d ; 38 add_u16 u16 u16 u16 | a + b ; 39 sub_u16 u16 u16 u16 | a - b
40 subrev_u16 u16 u16 u16 | b - a ; 41 mul_lo_u16 u16 u16 u16 | a * b ; 42 lshlrev_b16 u16 u16 u16 | b << (a & 15)
43 lshrrev_b16 u16 u16 u16 | b >> (a & 15) ; 44 ashrrev_i16 i16 u16 i16 | b >> (a & 15).astype(I16)
45 max_f16 f16 f16 f16 | fmax(a, b) ; 46 min_f16 f16 f16 f16 | fmin(a, b) ; 47 max_u16 u16 u16 u16 | maximum(a, b)
48 max_i16 i16 i16 i16 | maximum(a, b) ; 49 min_u16 u16 u16 u16 | minimum(a, b) ; 50 min_i16 i16 i16 i16 | minimum(a, b)
51 ldexp_f16 f16 f16 i16 | ldexp(a, b) ; 52 add_u32 u32 u32 u32 | a + b ; 53 sub_u32 u32 u32 u32 | a - b
54 subrev_u32 u32 u32 u32 | b - a ; 55 dot2c_f32_f16 f32 u32 u32 | dot2_f16(a, b, d)
56 dot2c_i32_i16 i32 u32 u32 | dot_int(a, b, d, 16, True) ; 57 dot4c_i32_i8 i32 u32 u32 | dot_int(a, b, d, 8, True)
58 dot8c_i32_i4 i32 u32 u32 | dot_int(a, b, d, 4, True) ; 59 fmac_f32 f32 f32 f32 | fma(a, b, d)
60 pk_fmac_f16 h h h | fma(a, b, d) ; 61 xnor_b32 u32 u32 u32 | ~(a ^ b)
"""
VOP1 = """
0 nop - - ; 1 mov_b32 u32 u32 | a ; 2 readfirstlane_b32 s u32 ; 3 cvt_i32_f64 i32 f64 | to_int(a, I32)
4 cvt_f64_i32 f64 i32 | a.astype(F64) ; 5 cvt_f32_i32 f32 i32 | a.astype(F32) ; 6 cvt_f32_u32 f32 u32 | a.astype(F32)
7 cvt_u32_f32 u32 f32 | to_int(a, U32) ; 8 cvt_i32_f32 i32 f32 | to_int(a, I32) ; 10 cvt_f16_f32 f16 f32 | a.astype(F16)
11 cvt_f32_f16 f32 f16 | a.astype(F32) ; 12 cvt_rpi_i32_f32 i32 f32 | to_int(floor(a.astype(F64) + 0.5), I32)
13 cvt_flr_i32_f32 i32 f32 | to_int(floor(a), I32) ; 15 cvt_f32_f64 f32 f64 | a.astype(F32)
16 cvt_f64_f32 f64 f32 | a.astype(F64) ; 17 cvt_f32_ubyte0 f32 u32 | (a & 255).astype(F32)
18 cvt_f32_ubyte1 f32 u32 | (a >> 8 & 255).astype(F32) ; 19 cvt_f32_ubyte2 f32 u32 | (a >> 16 & 255).astype(F32)
20 cvt_f32_ubyte3 f32 u32 | (a >> 24).astype(F32) ; 21 cvt_u32_f64 u32 f64 | to_int(a, U32)
22 cvt_f64_u32 f64 u32 | a.astype(F64) ; 23 trunc_f64 f64 f64 | trunc(a) ; 24 ceil_f64 f64 f64 | ceil(a)
25 rndne_f64 f64 f64 | rint(a) ; 26 floor_f64 f64 f64 | floor(a) ; 27 fract_f32 f32 f32 | fract(a)
28 trunc_f32 f32 f32 | trunc(a) ; 29 ceil_f32 f32 f32 | ceil(a) ; 30 rndne_f32 f32 f32 | rint(a)
31 floor_f32 f32 f32 | floor(a) ; 32 exp_f32 f32 f32 | near(exp2, a) ; 33 log_f32 f32 f32 | near(log2, a)
34 rcp_f32 f32 f32 | near(reciprocal, a) ; 35 rcp_iflag_f32 f32 f32 | near(reciprocal, a) ; 36 rsq_f32 f32 f32 | near(rsqrt, a)
37 rcp_f64 f64 f64 | reciprocal(a) ; 38 rsq_f64 f64 f64 | rsqrt(a) ; 39 sqrt_f32 f32 f32 | near(sqrt, a)
40 sqrt_f64 f64 f64 | sqrt(a) ; 41 sin_f32 f32 f32 | turns(sin, a) ; 42 cos_f32 f32 f32 | turns(cos, a)
43 not_b32 u32 u32 | ~a ; 44 bfrev_b32 u32 u32 | reverse(a) ; 45 ffbh_u32 i32 u32 | leading(a)
46 ffbl_b32 i32 u32 | leading(reverse(a)) ; 47 ffbh_i32 i32 u32 | leading(where(a >> 31 == 1, ~a, a))
48 frexp_exp_i32_f64 i32 f64 | exponent(a) ; 49 frexp_mant_f64 f64 f64 | mantissa(a) ; 50 fract_f64 f64 f64 | fract(a)
51 frexp_exp_i32_f32 i32 f32 | exponent(a) ; 52 frexp_mant_f32 f32 f32 | mantissa(a) ; 56 mov_b64 @942,950 u64 u64 | a
57 cvt_f16_u16 f16 u16 | a.astype(F16) ; 58 cvt_f16_i16 f16 i16 | a.astype(F16) ; 59 cvt_u16_f16 u16 f16 | to_int(a, U16)
60 cvt_i16_f16 i16 f16 | to_int(a, I16) ; 61 rcp_f16 f16 f16 | near(reciprocal, a) ; 62 sqrt_f16 f16 f16 | near(sqrt, a)
63 rsq_f16 f16 f16 | near(rsqrt, a) ; 64 log_f16 f16 f16 | near(log2, a) ; 65 exp_f16 f16 f16 | near(exp2, a)
66 frexp_mant_f16 f16 f16 | mantissa(a) ; 67 frexp_exp_i16_f16 i16 f16 | exponent(a) ; 68 floor_f16 f16 f16 | floor(a)
69 ceil_f16 f16 f16 | ceil(a) ; 70 trunc_f16 f16 f16 | trunc(a) ; 71 rndne_f16 f16 f16 | rint(a)
72 fract_f16 f16 f16 | fract(a) ; 73 sin_f16 f16 f16 | turns(sin, a) ; 74 cos_f16 f16 f16 | turns(cos, a)
81 swap_b32 u32 u32 | (a, d) ; 82 accvgpr_mov_b32 a a | a ; 84 cvt_f32_fp8 @942,950 f32 u32 | from_fp8(a & 255, "fp8")
85 cvt_f32_bf8 @942,950 f32 u32 | from_fp8(a & 255, "bf8")
86 cvt_pk_f32_fp8 @942,950 f64 u32 | two(from_fp8(a & 255, "fp8"), from_fp8(a >> 8 & 255, "fp8"))
87 cvt_pk_f32_bf8 @942,950 f64 u32 | two(from_fp8(a & 255, "bf8"), from_fp8(a >> 8 & 255, "bf8"))
89 permlane16_swap_b32 @950 u32 u32 | swap_rows(d, a, 16) ; 90 permlane32_swap_b32 @950 u32 u32 | swap_rows(d, a, 32)
91 cvt_f32_bf16 @950 f32 u16 | (a.astype(U32) << 16).view(F32)
"""
VOP3 = """
448 mad_legacy_f32 @90a f32 f32 f32 f32 | where((a == 0) \\| (b == 0), F32(0), a * b) + c
449 mad_f32 @90a f32 f32 f32 f32 | a * b + c ; 450 mad_i32_i24 i32 u32 u32 i32 | i24(a) * i24(b) + c
451 mad_u32_u24 u32 u32 u32 u32 | u24(a) * u24(b) + c ; 456 bfe_u32 u32 u32 u32 u32 | a >> (b & 31) & bits(c & 31)
457 bfe_i32 i32 i32 u32 u32 | bit_field(a, b & 31, c & 31) ; 458 bfi_b32 u32 u32 u32 u32 | a & b \\| ~a & c
459 fma_f32 f32 f32 f32 f32 | fma(a, b, c) ; 460 fma_f64 f64 f64 f64 f64 | fma(a, b, c)
462 alignbit_b32 u32 u32 u32 u32 | (a.astype(U64) << U64(32) \\| b) >> (c & 31)
463 alignbyte_b32 u32 u32 u32 u32 | (a.astype(U64) << U64(32) \\| b) >> 8 * (c & 3)
464 min3_f32 f32 f32 f32 f32 | fmin(fmin(a, b), c) ; 465 min3_i32 i32 i32 i32 i32 | minimum(minimum(a, b), c)
466 min3_u32 u32 u32 u32 u32 | minimum(minimum(a, b), c) ; 467 max3_f32 f32 f32 f32 f32 | fmax(fmax(a, b), c)
468 max3_i32 i32 i32 i32 i32 | maximum(maximum(a, b), c) ; 469 max3_u32 u32 u32 u32 u32 | maximum(maximum(a, b), c)
470 med3_f32 f32 f32 f32 f32 | median(a, b, c) ; 471 med3_i32 i32 i32 i32 i32 | median(a, b, c)
472 med3_u32 u32 u32 u32 u32 | median(a, b, c) ; 473 sad_u8 u32 u32 u32 u32 | differences(a, b, 8) + c
475 sad_u16 u32 u32 u32 u32 | differences(a, b, 16) + c ; 476 sad_u32 u32 u32 u32 u32 | maximum(a, b) - minimum(a, b) + c
477 cvt_pk_u8_f32 u32 f32 u32 u32 | insert_byte(to_int(rint(a), I32).clip(0, 255), b, c)
478 div_fixup_f32 f32 f32 f32 f32 | div_fixup(a, b, c) ; 479 div_fixup_f64 f64 f64 f64 f64 | div_fixup(a, b, c)
480 div_scale_f32 f32 m f32 f32 f32 | div_scale(a, b, c) ; 481 div_scale_f64 f64 m f64 f64 f64 | div_scale(a, b, c)
482 div_fmas_f32 f32 f32 f32 f32 | div_fmas(a, b, c, vcc) ; 483 div_fmas_f64 f64 f64 f64 f64 | div_fmas(a, b, c, vcc)
488 mad_u64_u32 u64 m u32 u32 u64 | carry64(a.astype(U64) * b, c)
489 mad_i64_i32 i64 m i32 i32 i64 | (a.astype(I64) * b + c, a * 0 != 0) ; 490 mad_legacy_f16 f16 f16 f16 f16 | a * b + c
491 mad_legacy_u16 u16 u16 u16 u16 | a * b + c ; 492 mad_legacy_i16 i16 i16 i16 i16 | a * b + c
493 perm_b32 u32 u32 u32 u32 | permute_bytes(a, b, c) ; 494 fma_legacy_f16 f16 f16 f16 f16 | fma(a, b, c)
495 div_fixup_legacy_f16 f16 f16 f16 f16 | div_fixup(a, b, c) ; 497 mad_u32_u16 u32 u16 u16 u32 | a.astype(U32) * b + c
498 mad_i32_i16 i32 i16 i16 i32 | a.astype(I32) * b + c ; 499 xad_u32 u32 u32 u32 u32 | (a ^ b) + c
500 min3_f16 f16 f16 f16 f16 | fmin(fmin(a, b), c) ; 501 min3_i16 i16 i16 i16 i16 | minimum(minimum(a, b), c)
502 min3_u16 u16 u16 u16 u16 | minimum(minimum(a, b), c) ; 503 max3_f16 f16 f16 f16 f16 | fmax(fmax(a, b), c)
504 max3_i16 i16 i16 i16 i16 | maximum(maximum(a, b), c) ; 505 max3_u16 u16 u16 u16 u16 | maximum(maximum(a, b), c)
506 med3_f16 f16 f16 f16 f16 | median(a, b, c) ; 507 med3_i16 i16 i16 i16 i16 | median(a, b, c)
508 med3_u16 u16 u16 u16 u16 | median(a, b, c) ; 509 lshl_add_u32 u32 u32 u32 u32 | (a << (b & 31)) + c
510 add_lshl_u32 u32 u32 u32 u32 | a + b << (c & 31) ; 511 add3_u32 u32 u32 u32 u32 | a + b + c
512 lshl_or_b32 u32 u32 u32 u32 | a << (b & 31) \\| c ; 513 and_or_b32 u32 u32 u32 u32 | a & b \\| c
514 or3_b32 u32 u32 u32 u32 | a \\| b \\| c ; 515 mad_f16 f16 f16 f16 f16 | a * b + c ; 516 mad_u16 u16 u16 u16 u16 | a * b + c
517 mad_i16 i16 i16 i16 i16 | a * b + c ; 518 fma_f16 f16 f16 f16 f16 | fma(a, b, c)
519 div_fixup_f16 f16 f16 f16 f16 | div_fixup(a, b, c)
520 lshl_add_u64 @942,950 u64 u64 u32 u64 | (a << (b & 7).astype(U64)) + c
563 bitop3_b16 @950 u16 u16 u16 u16 | bitop3(a, b, c, table) ; 564 bitop3_b32 @950 u32 u32 u32 u32 | bitop3(a, b, c, table)
613 ashr_pk_i8_i32 @950 u16 i32 i32 u32 | ashr_pack(a, b, c, -128, 127)
614 ashr_pk_u8_i32 @950 u16 i32 i32 u32 | ashr_pack(a, b, c, 0, 255)
615 cvt_pk_f16_f32 @950 u32 f32 f32 | pack(a.astype(F16), b.astype(F16))
616 cvt_pk_bf16_f32 @950 u32 f32 f32 | pack(to_bf16(a), to_bf16(b)) ; 640 add_f64 f64 f64 f64 | a + b
641 mul_f64 f64 f64 f64 | a * b ; 642 min_f64 f64 f64 f64 | fmin(a, b) ; 643 max_f64 f64 f64 f64 | fmax(a, b)
644 ldexp_f64 f64 f64 i32 | ldexp(a, b) ; 645 mul_lo_u32 u32 u32 u32 | a * b
646 mul_hi_u32 u32 u32 u32 | a.astype(U64) * b >> U64(32) ; 647 mul_hi_i32 i32 i32 i32 | a.astype(I64) * b >> I64(32)
648 ldexp_f32 f32 f32 i32 | ldexp(a, b) ; 649 readlane_b32 s u32 u32 ; 650 writelane_b32 u32 u32 u32
651 bcnt_u32_b32 u32 u32 u32 | bit_count(a) + b ; 652 mbcnt_lo_u32_b32 u32 u32 u32 | bit_count(a & below(0)) + b
653 mbcnt_hi_u32_b32 u32 u32 u32 | bit_count(a & below(32)) + b ; 655 lshlrev_b64 u64 u32 u64 | b << (a & 63).astype(U64)
656 lshrrev_b64 u64 u32 u64 | b >> (a & 63).astype(U64) ; 657 ashrrev_i64 i64 u32 i64 | b >> (a & 63).astype(I64)
659 bfm_b32 u32 u32 u32 | bits(a & 31) << (b & 31) ; 662 cvt_pkrtz_f16_f32 u32 f32 f32 | pack(toward_zero(a), toward_zero(b))
663 cvt_pk_u16_u32 u32 u32 u32 | pack(minimum(a, 65535).astype(U16), minimum(b, 65535).astype(U16))
664 cvt_pk_i16_i32 u32 i32 i32 | pack(a.clip(-32768, 32767).astype(I16), b.clip(-32768, 32767).astype(I16))
668 add_i32 i32 i32 i32 | a + b ; 669 sub_i32 i32 i32 i32 | a - b ; 670 add_i16 i16 i16 i16 | a + b
671 sub_i16 i16 i16 i16 | a - b ; 672 pack_b32_f16 u32 f16 f16 | pack(a, b)
673 mul_legacy_f32 f32 f32 f32 | where((a == 0) \\| (b == 0), F32(0), a * b)
674 cvt_pk_fp8_f32 @942,950 u16 f32 f32 | to_fp8(a, "fp8") \\| to_fp8(b, "fp8") << 8
675 cvt_pk_bf8_f32 @942,950 u16 f32 f32 | to_fp8(a, "bf8") \\| to_fp8(b, "bf8") << 8
680 minimum3_f32 @950 f32 f32 f32 f32 | minimum(minimum(a, b), c)
681 maximum3_f32 @950 f32 f32 f32 f32 | maximum(maximum(a, b), c)
"""
VOP3P = """
0 pk_mad_i16 I I I I | a * b + c ; 1 pk_mul_lo_u16 U U U | a * b ; 2 pk_add_i16 I I I | a + b ; 3 pk_sub_i16 I I I | a - b
4 pk_lshlrev_b16 U U U | b << (a & 15) ; 5 pk_lshrrev_b16 U U U | b >> (a & 15) ; 6 pk_ashrrev_i16 I I I | b >> (a & 15)
7 pk_max_i16 I I I | maximum(a, b) ; 8 pk_min_i16 I I I | minimum(a, b) ; 9 pk_mad_u16 U U U U | a * b + c
10 pk_add_u16 U U U | a + b ; 11 pk_sub_u16 U U U | a - b ; 12 pk_max_u16 U U U | maximum(a, b)
13 pk_min_u16 U U U | minimum(a, b) ; 14 pk_fma_f16 h h h h | fma(a, b, c) ; 15 pk_add_f16 h h h | a + b
16 pk_mul_f16 h h h | a * b ; 17 pk_min_f16 h h h | fmin(a, b) ; 18 pk_max_f16 h h h | fmax(a, b)
27 pk_minimum3_f16 @950 h h h h | minimum(minimum(a, b), c) ; 28 pk_maximum3_f16 @950 h h h h | maximum(maximum(a, b), c)
32 fma_mix_f32 f32 x x x | fma(a, b, c) ; 33 fma_mixlo_f16 f16 x x x | fma(a, b, c).astype(F16)
34 fma_mixhi_f16 f16 x x x | fma(a, b, c).astype(F16) ; 26 dot2_f32_bf16 @950 f32 u32 u32 f32 | dot2_bf16(a, b, c)
35 dot2_f32_f16 f32 u32 u32 f32 | dot2_f16(a, b, c) ; 38 dot2_i32_i16 i32 u32 u32 i32 | dot_int(a, b, c, 16, True)
39 dot2_u32_u16 u32 u32 u32 u32 | dot_int(a, b, c, 16, False) ; 40 dot4_i32_i8 i32 u32 u32 i32 | dot_int(a, b, c, 8, True)
41 dot4_u32_u8 u32 u32 u32 u32 | dot_int(a, b, c, 8, False) ; 42 dot8_i32_i4 i32 u32 u32 i32 | dot_int(a, b, c, 4, True)
43 dot8_u32_u4 u32 u32 u32 u32 | dot_int(a, b, c, 4, False) ; 48 pk_fma_f32 p p p p | fma(a, b, c)
49 pk_mul_f32 p p p | a * b ; 50 pk_add_f32 p p p | a + b ; 51 pk_mov_b32 p p p ; 88 accvgpr_read_b32 u32 a | a
89 accvgpr_write_b32 a u32 | a
"""
# VOPC: opcode = first of the type + place of the comparison; the types and their first opcodes.  cmpx (the same + 16) also
# writes exec.
COMPARISONS_FLOAT = """f: a != a | lt: a < b | eq: a == b | le: a <= b | gt: a > b | lg: (a < b) + (a > b) | ge: a >= b
o: (a == a) & (b == b) | u: (a != a) + (b != b) | nge: ~(a >= b) | nlg: ~((a < b) + (a > b)) | ngt: ~(a > b) | nle: ~(a <= b)
neq: ~(a == b) | nlt: ~(a < b) | tru: (a == a) + True"""
COMPARISONS_INT = "f: a != a | lt: a < b | eq: a == b | le: a <= b | gt: a > b | ne: a != b | ge: a >= b | t: a == a"
COMPARE_FIRST = {"f16": 32, "f32": 64, "f64": 96, "i16": 160, "u16": 168, "i32": 192, "u32": 200, "i64": 224, "u64": 232}

# DS, FLAT (also GLOBAL, SCRATCH), MUBUF: opcode, name, number of registers of data (stored) and of the result (loaded).
DS = """
0 add_u32 1 0 | a + b ; 1 sub_u32 1 0 | a - b ; 3 inc_u32 1 0 | where(a >= b, 0, a + 1)
4 dec_u32 1 0 | where((a == 0) \\| (a > b), b, a - 1) ; 5 min_i32 1 0 | minimum(a, b) ; 6 max_i32 1 0 | maximum(a, b)
7 min_u32 1 0 | minimum(a, b) ; 8 max_u32 1 0 | maximum(a, b) ; 9 and_b32 1 0 | a & b ; 10 or_b32 1 0 | a \\| b
11 xor_b32 1 0 | a ^ b ; 13 write_b32 1 0 ; 14 write2_b32 1 0 ; 15 write2st64_b32 1 0 ; 18 min_f32 1 0 | fmin(a, b)
19 max_f32 1 0 | fmax(a, b) ; 21 add_f32 1 0 | a + b ; 23 pk_add_f16 @942,950 1 0 | a + b
24 pk_add_bf16 @942,950 1 0 | add_bf16(a, b) ; 30 write_b8 1 0 ; 31 write_b16 1 0 ; 32 add_rtn_u32 1 1 | a + b
33 sub_rtn_u32 1 1 | a - b ; 35 inc_rtn_u32 1 1 | where(a >= b, 0, a + 1)
36 dec_rtn_u32 1 1 | where((a == 0) \\| (a > b), b, a - 1) ; 37 min_rtn_i32 1 1 | minimum(a, b)
38 max_rtn_i32 1 1 | maximum(a, b) ; 39 min_rtn_u32 1 1 | minimum(a, b) ; 40 max_rtn_u32 1 1 | maximum(a, b)
41 and_rtn_b32 1 1 | a & b ; 42 or_rtn_b32 1 1 | a \\| b ; 43 xor_rtn_b32 1 1 | a ^ b ; 45 wrxchg_rtn_b32 1 1 | b
48 cmpst_rtn_b32 2 1 | where(a == b, c, a) ; 50 min_rtn_f32 1 1 | fmin(a, b) ; 51 max_rtn_f32 1 1 | fmax(a, b)
53 add_rtn_f32 1 1 | a + b ; 54 read_b32 0 1 ; 55 read2_b32 0 2 ; 56 read2st64_b32 0 2 ; 57 read_i8 0 1 ; 58 read_u8 0 1
59 read_i16 0 1 ; 60 read_u16 0 1 ; 61 swizzle_b32 0 1 ; 62 permute_b32 1 1 ; 63 bpermute_b32 1 1 ; 64 add_u64 2 0 | a + b
65 sub_u64 2 0 | a - b ; 69 min_i64 2 0 | minimum(a, b) ; 70 max_i64 2 0 | maximum(a, b) ; 71 min_u64 2 0 | minimum(a, b)
72 max_u64 2 0 | maximum(a, b) ; 73 and_b64 2 0 | a & b ; 74 or_b64 2 0 | a \\| b ; 75 xor_b64 2 0 | a ^ b ; 77 write_b64 2 0
78 write2_b64 2 0 ; 79 write2st64_b64 2 0 ; 82 min_f64 2 0 | fmin(a, b) ; 83 max_f64 2 0 | fmax(a, b) ; 84 write_b8_d16_hi 1 0
85 write_b16_d16_hi 1 0 ; 86 read_u8_d16 0 1 ; 87 read_u8_d16_hi 0 1 ; 88 read_i8_d16 0 1 ; 89 read_i8_d16_hi 0 1
90 read_u16_d16 0 1 ; 91 read_u16_d16_hi 0 1 ; 92 add_f64 2 0 | a + b ; 96 add_rtn_u64 2 2 | a + b ; 97 sub_rtn_u64 2 2 | a - b
101 min_rtn_i64 2 2 | minimum(a, b) ; 102 max_rtn_i64 2 2 | maximum(a, b) ; 103 min_rtn_u64 2 2 | minimum(a, b)
104 max_rtn_u64 2 2 | maximum(a, b) ; 105 and_rtn_b64 2 2 | a & b ; 106 or_rtn_b64 2 2 | a \\| b ; 107 xor_rtn_b64 2 2 | a ^ b
109 wrxchg_rtn_b64 2 2 | b ; 112 cmpst_rtn_b64 4 2 | where(a == b, c, a) ; 114 min_rtn_f64 2 2 | fmin(a, b)
115 max_rtn_f64 2 2 | fmax(a, b) ; 118 read_b64 0 2 ; 119 read2_b64 0 4 ; 120 read2st64_b64 0 4 ; 124 add_rtn_f64 2 2 | a + b
183 pk_add_rtn_f16 @942,950 1 1 | a + b ; 184 pk_add_rtn_bf16 @942,950 1 1 | add_bf16(a, b) ; 222 write_b96 3 0
223 write_b128 4 0 ; 224 read_b64_tr_b4 @950 0 2 ; 226 read_b64_tr_b8 @950 0 2 ; 227 read_b64_tr_b16 @950 0 2
254 read_b96 0 3 ; 255 read_b128 0 4
"""
FLAT = """
16 load_ubyte 0 1 ; 17 load_sbyte 0 1 ; 18 load_ushort 0 1 ; 19 load_sshort 0 1 ; 20 load_dword 0 1 ; 21 load_dwordx2 0 2
22 load_dwordx3 0 3 ; 23 load_dwordx4 0 4 ; 24 store_byte 1 0 ; 25 store_byte_d16_hi 1 0 ; 26 store_short 1 0
27 store_short_d16_hi 1 0 ; 28 store_dword 1 0 ; 29 store_dwordx2 2 0 ; 30 store_dwordx3 3 0 ; 31 store_dwordx4 4 0
32 load_ubyte_d16 0 1 ; 33 load_ubyte_d16_hi 0 1 ; 34 load_sbyte_d16 0 1 ; 35 load_sbyte_d16_hi 0 1 ; 36 load_short_d16 0 1
37 load_short_d16_hi 0 1 ; 38 load_lds_ubyte @942,950 0 0 ; 39 load_lds_sbyte @942,950 0 0 ; 40 load_lds_ushort @942,950 0 0
41 load_lds_sshort @942,950 0 0 ; 42 load_lds_dword @942,950 0 0 ; 64 atomic_swap 1 1 | b
65 atomic_cmpswap 2 1 | where(a == c, b, a) ; 66 atomic_add 1 1 | a + b ; 67 atomic_sub 1 1 | a - b
68 atomic_smin 1 1 | minimum(a, b) ; 69 atomic_umin 1 1 | minimum(a, b) ; 70 atomic_smax 1 1 | maximum(a, b)
71 atomic_umax 1 1 | maximum(a, b) ; 72 atomic_and 1 1 | a & b ; 73 atomic_or 1 1 | a \\| b ; 74 atomic_xor 1 1 | a ^ b
75 atomic_inc 1 1 | where(a >= b, 0, a + 1) ; 76 atomic_dec 1 1 | where((a == 0) \\| (a > b), b, a - 1)
77 atomic_add_f32 1 1 | a + b ; 78 atomic_pk_add_f16 1 1 | a + b ; 79 atomic_add_f64 2 2 | a + b
80 atomic_min_f64 2 2 | fmin(a, b) ; 81 atomic_max_f64 2 2 | fmax(a, b) ; 82 atomic_pk_add_bf16 @942,950 1 1 | add_bf16(a, b)
96 atomic_swap_x2 2 2 | b ; 97 atomic_cmpswap_x2 4 2 | where(a == c, b, a) ; 98 atomic_add_x2 2 2 | a + b
99 atomic_sub_x2 2 2 | a - b ; 100 atomic_smin_x2 2 2 | minimum(a, b) ; 101 atomic_umin_x2 2 2 | minimum(a, b)
102 atomic_smax_x2 2 2 | maximum(a, b) ; 103 atomic_umax_x2 2 2 | maximum(a, b) ; 104 atomic_and_x2 2 2 | a & b
105 atomic_or_x2 2 2 | a \\| b ; 106 atomic_xor_x2 2 2 | a ^ b ; 125 load_lds_dwordx4 @950 0 0 ; 126 load_lds_dwordx3 @950 0 0
"""
# MUBUF numbers its loads, stores and atomics as FLAT does; besides it has these.
MUBUF_CONTROL = """
40 wbl2 @90a,942,950 ; 41 inv @942,950 ; 62 wbinvl1 ; 63 wbinvl1_vol
"""
# MFMA: opcode, rows x columns x depth, blocks, types of A, of B, of C and D, passes of 4 cycles on gfx90a/942/950 (0: the chip
# lacks it).  Names differ: gfx90a writes 16x16x16f16 and 32x32x4bf16_1k, the others 16x16x16_f16 and 32x32x4_2b_bf16.
MFMA = """
64 32x32x1 2 f32 f32 f32 16/16/16 ; 65 16x16x1 4 f32 f32 f32 8/8/8 ; 66 4x4x1 16 f32 f32 f32 2/2/2
68 32x32x2 1 f32 f32 f32 16/16/16 ; 69 16x16x4 1 f32 f32 f32 8/8/8 ; 72 32x32x4 2 f16 f16 f32 16/16/16
73 16x16x4 4 f16 f16 f32 8/8/8 ; 74 4x4x4 16 f16 f16 f32 2/2/2 ; 76 32x32x8 1 f16 f16 f32 16/8/8
77 16x16x16 1 f16 f16 f32 8/4/4 ; 80 32x32x4 2 i8 i8 i32 16/16/16 ; 81 16x16x4 4 i8 i8 i32 8/8/8 ; 82 4x4x4 16 i8 i8 i32 2/2/2
84 32x32x8 1 i8 i8 i32 16/0/0 ; 85 16x16x16 1 i8 i8 i32 8/0/0 ; 99 32x32x4 2 bf16_1k bf16_1k f32 16/0/0
100 16x16x4 4 bf16_1k bf16_1k f32 8/0/0 ; 101 4x4x4 16 bf16_1k bf16_1k f32 2/0/0 ; 102 32x32x8 1 bf16_1k bf16_1k f32 16/0/0
103 16x16x16 1 bf16_1k bf16_1k f32 8/0/0 ; 104 32x32x2 2 bf16 bf16 f32 16/0/0 ; 105 16x16x2 4 bf16 bf16 f32 8/0/0
107 4x4x2 16 bf16 bf16 f32 2/0/0 ; 108 32x32x4 1 bf16 bf16 f32 16/0/0 ; 109 16x16x8 1 bf16 bf16 f32 8/0/0
110 16x16x4 1 f64 f64 f64 8/8/16 ; 111 4x4x4 4 f64 f64 f64 4/4/4 ; 62 16x16x8 1 xf32 xf32 f32 0/4/0
63 32x32x4 1 xf32 xf32 f32 0/8/0 ; 86 32x32x16 1 i8 i8 i32 0/8/8 ; 87 16x16x32 1 i8 i8 i32 0/4/4
93 32x32x4 2 bf16 bf16 f32 0/16/16 ; 94 16x16x4 4 bf16 bf16 f32 0/8/8 ; 95 4x4x4 16 bf16 bf16 f32 0/2/2
96 32x32x8 1 bf16 bf16 f32 0/8/8 ; 97 16x16x16 1 bf16 bf16 f32 0/4/4 ; 112 16x16x32 1 bf8 bf8 f32 0/4/4
113 16x16x32 1 bf8 fp8 f32 0/4/4 ; 114 16x16x32 1 fp8 bf8 f32 0/4/4 ; 115 16x16x32 1 fp8 fp8 f32 0/4/4
116 32x32x16 1 bf8 bf8 f32 0/8/8 ; 117 32x32x16 1 bf8 fp8 f32 0/8/8 ; 118 32x32x16 1 fp8 bf8 f32 0/8/8
119 32x32x16 1 fp8 fp8 f32 0/8/8 ; 53 16x16x32 1 bf16 bf16 f32 0/0/4 ; 54 16x16x64 1 i8 i8 i32 0/0/4
55 32x32x16 1 bf16 bf16 f32 0/0/8 ; 56 32x32x32 1 i8 i8 i32 0/0/8 ; 84 16x16x32 1 f16 f16 f32 0/0/4
85 32x32x16 1 f16 f16 f32 0/0/8
45 16x16x128 1 f8f6f4 f8f6f4 f32 0/0/4 ; 46 32x32x64 1 f8f6f4 f8f6f4 f32 0/0/8
"""
