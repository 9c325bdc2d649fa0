// SPDX-License-Identifier: Apache-2.0
// Calls about files that a test may have fail, or do something first: included before native.c.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

// Returns the number of an error, or 0 to go on. A test sets it; there is one for all sources.
__attribute__((weak)) int (*test_hook)(const char *name);

// Bytes that memory has of a file, if not all.
__attribute__((weak)) size_t test_most;

static inline int fails(const char *name) {
    int error = test_hook ? test_hook(name) : 0;
    errno = error;
    return error != 0;
}

static inline ssize_t short_writev(int file, const struct iovec *parts, int count) {
    struct iovec part = parts[0];  // no more than 100 bytes at a time
    if (part.iov_len > 100) part.iov_len = 100;
    if (fails("writev")) return errno < 0 ? 0 : -1;
    return count ? writev(file, &part, 1) : 0;
}

static inline int closes(int file) {
    int is_wrong = fails("close");
    int error = errno;
    close(file);
    errno = error;
    return is_wrong ? -1 : 0;
}

static inline ssize_t part_preadv2(int file, const struct iovec *parts, int count, off_t place,
                                   int flags) {
    if (fails(flags & RWF_NOWAIT ? "preadv2" : "hang")) return -1;
    if (!test_most) return preadv2(file, parts, count, place, flags & ~RWF_NOWAIT);
    size_t first = parts[0].iov_len < test_most ? parts[0].iov_len : test_most;
    struct iovec some[] = {{parts[0].iov_base, first},
                           {parts[1].iov_base, test_most - first}};
    return preadv2(file, some, count, place, flags & ~RWF_NOWAIT);
}

#define open(...) (fails("open") ? -1 : open(__VA_ARGS__))
#define lstat(...) (fails("stat") ? -1 : lstat(__VA_ARGS__))
#define renameat2(...) (fails("renameat2") ? -1 : renameat2(__VA_ARGS__))
#define link(...) (fails("link") ? -1 : link(__VA_ARGS__))
#define mkdir(...) (fails("mkdir") ? -1 : mkdir(__VA_ARGS__))
#define pread(...) (fails("pread") ? -1 : pread(__VA_ARGS__))
#define preadv2 part_preadv2
#define writev short_writev
#define close closes
