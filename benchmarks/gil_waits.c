// SPDX-License-Identifier: Apache-2.0
//
// How long a thread waits for the interpreter lock; preloaded by benchmarks/decode.py.
//
// CPython waits for the lock on condition variables of its own, in `_PyRuntime`. Waits on
// any other are passed on unseen. Nothing is sampled, and nobody who does not wait pays.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <time.h>

// One wait for the lock is a series of short ones: of the switch interval each.
#define GAP_NS 5000

static __thread long long ended, current, longest, waited, count;
static int (*timed)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*endless)(pthread_cond_t *, pthread_mutex_t *);
static char *first, *last;

static void *next(const char *name) {
    // The oldest version of these is for programs of before 2002.
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void find(void) {
    timed = next("pthread_cond_timedwait");
    endless = next("pthread_cond_wait");
    first = dlsym(RTLD_DEFAULT, "_PyRuntime");
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    if (first && dladdr1(first, &info, (void **)&symbol, RTLD_DL_SYMENT) && symbol)
        last = first + symbol->st_size;
}

static long long now(void) {
    struct timespec read;
    clock_gettime(CLOCK_MONOTONIC, &read);
    return read.tv_sec * 1000000000LL + read.tv_nsec;
}

static int is_lock(void *condition) {
    return (char *)condition >= first && (char *)condition < last;
}

static void note(long long begun) {
    long long over = now();
    current = (begun - ended < GAP_NS ? current : 0) + over - begun;
    ended = over;
    waited += over - begun;
    count++;
    if (current > longest) longest = current;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                           const struct timespec *until) {
    if (!is_lock(condition)) return timed(condition, mutex, until);
    long long begun = now();
    int told = timed(condition, mutex, until);
    note(begun);
    return told;
}

int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
    if (!is_lock(condition)) return endless(condition, mutex);
    long long begun = now();
    int told = endless(condition, mutex);
    note(begun);
    return told;
}

// Returns the calling thread's longest wait since its last call, and forgets it; -1 if
// the lock cannot be told from other conditions.
long long ucm_longest_wait_ns(void) {
    long long told = last ? longest : -1;
    longest = current = 0;
    return told;
}

// Returns how often the calling thread has waited since its last call, and puts how long.
long long ucm_waits(long long *ns) {
    long long told = count;
    *ns = waited;
    waited = count = 0;
    return told;
}
