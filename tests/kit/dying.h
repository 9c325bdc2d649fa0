// SPDX-License-Identifier: Apache-2.0
// Stores to shared memory, any of which a test may have be the last: included before native_slab.c.

#define _GNU_SOURCE
#include <setjmp.h>
#include <stdatomic.h>

#pragma GCC diagnostic ignored "-Wclobbered"  // who comes back from there returns

__attribute__((weak)) long test_stores;  // left; 0 for all that there are
__attribute__((weak)) jmp_buf test_death;

enum { TEST_DIED = -99 };

static inline void test_store(void) {
    if (test_stores && !--test_stores) longjmp(test_death, 1);
}

#define MAY_DIE \
    if (test_stores && setjmp(test_death)) return TEST_DIED;
#define PUT(place, value) \
    (test_store(), __atomic_store_n(&(place), (value), __ATOMIC_RELEASE), \
     atomic_signal_fence(memory_order_seq_cst))
