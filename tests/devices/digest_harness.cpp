// SPDX-License-Identifier: Apache-2.0
// A CPU as far as digest.cu needs a GPU: a thread of its own for each, group after group.
#include <pthread.h>

struct place {
    unsigned x;
};
static thread_local place threadIdx;
static place blockIdx, gridDim;
static pthread_barrier_t barrier;

#define __constant__ static const
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(number)
#define __syncthreads() pthread_barrier_wait(&barrier)
#define __ldcs(pointer) (*(pointer))

static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}

#include "digest.cu"

struct call {
    unsigned thread;
    const u64 *starts, *strides, num_chunks, *blocks, *seeds;
    u64 *digests, count;
};

static void *run(void *given) {
    call *of = (call *)given;
    threadIdx.x = of->thread;
    ucm_digest(of->starts, of->strides, of->num_chunks, of->blocks, of->seeds, of->digests,
               of->count);
    return 0;
}

extern "C" void launch(unsigned num_groups, const u64 *starts, const u64 *strides,
                       u64 num_chunks, const u64 *blocks, const u64 *seeds, u64 *digests,
                       u64 count) {
    gridDim.x = num_groups;
    pthread_barrier_init(&barrier, 0, NUM_THREADS);
    for (blockIdx.x = 0; blockIdx.x < num_groups; blockIdx.x++) {
        pthread_t threads[NUM_THREADS];
        call *calls[NUM_THREADS];
        for (unsigned at = 0; at < NUM_THREADS; at++) {
            calls[at] = new call{at, starts, strides, num_chunks, blocks, seeds, digests, count};
            pthread_create(&threads[at], 0, run, calls[at]);
        }
        for (unsigned at = 0; at < NUM_THREADS; at++) {
            pthread_join(threads[at], 0);
            delete calls[at];
        }
    }
    pthread_barrier_destroy(&barrier);
}
