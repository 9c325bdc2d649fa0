// SPDX-License-Identifier: Apache-2.0
// The wall clock of a process that a test moves: preloaded, with the seconds that it is ahead
// in a file of eight bytes that WALL_CLOCK_AHEAD names. All other clocks are the machine's.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *ahead;

__attribute__((constructor)) static void look_up(void) {
    const char *path = getenv("WALL_CLOCK_AHEAD");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *page = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED)
        ahead = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (!result && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    if (told)
        *told = now.tv_sec;
    return now.tv_sec;
}
