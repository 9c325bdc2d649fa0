// SPDX-License-Identifier: Apache-2.0
// Calls about files of which a signal interrupts every other one: included before native.c.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>

static inline int is_interrupted(void) {
    static _Thread_local unsigned calls;
    errno = EINTR;
    return ++calls % 2;
}

static inline int interrupted_open(const char *path, int flags, mode_t mode) {
    return is_interrupted() ? -1 : open(path, flags, mode);
}

static inline int interrupted_lstat(const char *path, struct stat *is) {
    return is_interrupted() ? -1 : lstat(path, is);
}

static inline int interrupted_fstat(int file, struct stat *is) {
    return is_interrupted() ? -1 : fstat(file, is);
}

static inline ssize_t interrupted_writev(int file, const struct iovec *parts, int count) {
    return is_interrupted() ? -1 : writev(file, parts, count);
}

#define open interrupted_open
#define writev interrupted_writev
#define lstat interrupted_lstat
#define fstat interrupted_fstat
