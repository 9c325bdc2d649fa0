// SPDX-License-Identifier: Apache-2.0
// The checksum of blocks where they lie on a GPU: xxh3-64 with a seed, as xxhash has it for
// more than 240 bytes (XXH3_hashLong_64b_withSeed of xxHash 0.8, doc/xxhash_spec.md).
//
// A block is a number of chunks of 1 KB, each in one piece and at a multiple of 8. Eight
// accumulators get the sums of a chunk, which any number of threads can compute. Between two
// chunks they are scrambled, in the order of the chunks: one warp does that for a tile of them
// while the others read the next one.
//
// scripts/digest_ptx.py makes digest.ptx of this; tests/devices/test_digest_kernel.py
// compiles it for the CPU.

typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 32 /* chunks; eight threads each */
#define READERS (8 * TILE)
#define NUM_THREADS (READERS + 32)

#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL,
    0x1f67b3b7a4a44072ULL, 0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL,
    0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL, 0xcb00c391bb52283cULL,
    0xa32e531b8b65d088ULL, 0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL,
    0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL,
    0x647378d9c97e9fc8ULL, 0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL,
    0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL, 0xfca1477d58be162bULL,
    0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL,
};

__constant__ u64 FIRST[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                             PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

// Eight bytes of the secret from a place that is no multiple of eight.
__device__ static u64 between(const u64 *secret, u32 place) {
    u32 word = place / 8, bits = place % 8 * 8;
    return secret[word] >> bits | secret[word + 1] << (64 - bits);
}

// Put the digest of each of some blocks into `digests`. A chunk of block b is at
// starts[chunk] + b * strides[chunk].
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    ucm_digest(const u64 *starts, const u64 *strides, u64 num_chunks, const u64 *blocks,
               const u64 *seeds, u64 *digests, u64 count) {
    __shared__ u64 secret[24], products[2][TILE][8], sums[2][TILE][8], ends[8];
    __shared__ u64 block;
    const u32 thread = threadIdx.x, lane = thread % 8, row = thread / 8;
    const u64 num_tiles = (num_chunks + TILE - 1) / TILE;
    for (u64 at = blockIdx.x; at < count; at += gridDim.x) {
        if (thread < 24) secret[thread] = SECRET[thread] + (thread % 2 ? -seeds[at] : seeds[at]);
        if (thread == 24) block = blocks[at];
        __syncthreads();
        u64 sum = FIRST[lane];
        for (u64 tile = 0; tile <= num_tiles; tile++) {
            u64 chunk = tile * TILE + row;
            if (thread < READERS && chunk < num_chunks) {
                const u64 *from = (const u64 *)(starts[chunk] + block * strides[chunk]) + lane;
                const u32 is_last = chunk == num_chunks - 1;
                u64 all = 0, product = 0;
#pragma unroll
                for (u32 stripe = 0; stripe < 16; stripe++) {
                    u64 word = __ldcs(from + 8 * stripe), key = word ^ secret[stripe + lane];
                    if (stripe == 15 && is_last) key = word ^ between(secret, 121 + 8 * lane);
                    all += word;
                    product += (key & 0xFFFFFFFFULL) * (key >> 32);
                }
                products[tile % 2][row][lane] = product;
                sums[tile % 2][row][lane] = all;
            }
            if (thread >= READERS && thread < READERS + 8 && tile) {
                u64 before = (tile - 1) * TILE, left = num_chunks - before;
                for (u32 of = 0; of < TILE && of < left; of++) {
                    sum += products[(tile - 1) % 2][of][lane] + sums[(tile - 1) % 2][of][lane ^ 1];
                    if (before + of == num_chunks - 1) break;
                    sum = (sum ^ sum >> 47 ^ secret[16 + lane]) * PRIME32_1;
                }
            }
            __syncthreads();
        }
        if (thread >= READERS && thread < READERS + 8) ends[lane] = sum;
        __syncthreads();
        if (!thread) {
            u64 digest = num_chunks * 1024 * PRIME64_1;
            for (u32 pair = 0; pair < 4; pair++) {
                u64 left = ends[2 * pair] ^ between(secret, 11 + 16 * pair);
                u64 right = ends[2 * pair + 1] ^ between(secret, 19 + 16 * pair);
                digest += left * right ^ __umul64hi(left, right);
            }
            digest = (digest ^ digest >> 37) * 0x165667919E3779F9ULL;
            digests[at] = digest ^ digest >> 32;
        }
        __syncthreads();
    }
}
