// SPDX-License-Identifier: Apache-2.0
//
// Many native calls by one call from Python: see native.py. Knows nothing of what it is for,
// and needs no header but the compiler's and the system's.

#define _GNU_SOURCE
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t digest_function(const void *, size_t, uint64_t);
typedef int query_function(void *);
typedef int batch_function(uint64_t *, uint64_t *, uint64_t *, size_t, void *, void *,
                           size_t, void *, void *);

int ucm_version(void) { return 14; }  // each change of a function raises it; see native.py

// How bytes are digested part by part: functions of another library.
struct digester {
    void *(*create)(void);
    int (*destroy)(void *);
    int (*reset)(void *, uint64_t);
    int (*update)(void *, const void *, size_t);
    uint64_t (*tell)(const void *);
};

// Copy past the caches, which read what they write over, and would lose what is computed with.
// Not where lines of one side lie across those of the other. CPUs of Intel compare only the low 12
// bits of addresses: a load that is as far into its page as the line just written waits for that
// (0.5 GB/s and not 6).
static void copy_past(uint8_t *to, const uint8_t *from, size_t nbytes) {
#ifdef __SSE2__
    size_t head = -(uintptr_t)to % 64;
    if (nbytes >= head + 64 && ((uintptr_t)to - (uintptr_t)from) % 64 == 0) {
        memcpy(to, from, head);
        for (to += head, from += head, nbytes -= head; nbytes >= 64; nbytes -= 64)
            for (int part = 0; part < 4; part++, to += 16, from += 16)
                _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
        _mm_sfence();  // behind these all sees them as behind others
    }
#endif
    memcpy(to, from, nbytes);
}

// Where parts of blocks are, in pages and in a slot.
struct parts {
    const int64_t *starts, *strides, *sizes, *offsets;
    size_t count;
};

// Slots to be digested, by whoever takes the next one; and copied to pages meanwhile, if `blocks`.
struct slots {
    digest_function *digest;
    const uint8_t *pool;
    size_t slot_bytes, nbytes, count;
    const int64_t *slots;
    const uint64_t *seeds;
    uint64_t *digests;
    int most, is_past;
    const struct digester *digester;
    struct parts parts;
    const int64_t *blocks;
    atomic_size_t next;
};

// Threads of the process that compute digests now: helpers, and those that asked for them.
static atomic_int num_digesting;

// A thread takes 30 to 150 us to begin, and 2 MB 150 to 300.
enum { MOST_HELPERS = 63, HELPED_BYTES = 2 << 20, STACK_BYTES = 256 << 10 };
// Digested, and copied while the CPU's cache has them.
enum { PIECE_BYTES = 256 << 10, PAST_BYTES = 1 << 20 };

// A child has none of its parent's helpers.
static void forget_helpers(void) { atomic_store(&num_digesting, 0); }
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_helpers);
}

// Change the number by one, unless that is beyond `most` or, downwards, not above it.
static int change(int by, int most) {
    int now = atomic_load(&num_digesting);
    while (by > 0 ? now < most : now > most)
        if (atomic_compare_exchange_weak(&num_digesting, &now, now + by)) return 1;
    return 0;
}

// A block on its way to its pages: what is copied was digested just before.
struct passage {
    const struct slots *all;
    const uint8_t *slot;
    void *state;  // NULL: all of it is digested
    size_t digested;
};

static void digest_until(struct passage *passage, size_t wanted) {
    if (!passage->state || wanted <= passage->digested) return;
    size_t most = passage->all->nbytes, end = passage->digested + PIECE_BYTES;
    if (end < wanted) end = wanted;
    if (end > most) end = most;
    passage->all->digester->update(passage->state, passage->slot + passage->digested,
                                   end - passage->digested);
    passage->digested = end;
}

static void pass(struct passage *passage, uint8_t *page, size_t place, size_t nbytes) {
    while (nbytes) {
        size_t some = nbytes < PIECE_BYTES ? nbytes : PIECE_BYTES;
        digest_until(passage, place + some);
        if (passage->all->is_past) copy_past(page, passage->slot + place, some);
        else memcpy(page, passage->slot + place, some);
        page += some;
        place += some;
        nbytes -= some;
    }
}

// Let each part of a block pass, neighbours merged where both sides continue.
static void pass_parts(struct passage *passage, int64_t block) {
    const struct parts *parts = &passage->all->parts;
    for (size_t at = 0; at < parts->count;) {
        int64_t page = parts->starts[at] + block * parts->strides[at];
        int64_t place = parts->offsets[at], nbytes = parts->sizes[at];
        while (++at < parts->count && parts->offsets[at] == place + nbytes &&
               parts->starts[at] + block * parts->strides[at] == page + nbytes)
            nbytes += parts->sizes[at];
        pass(passage, (uint8_t *)page, (size_t)place, (size_t)nbytes);
    }
}

static int digest_next(struct slots *all, void *state) {
    size_t at = atomic_fetch_add(&all->next, 1);
    if (at >= all->count) return 0;
    const uint8_t *slot = all->pool + (size_t)all->slots[at] * all->slot_bytes;
    struct passage passage = {.all = all, .slot = slot, .state = state};
    if (state) all->digester->reset(state, all->seeds[at]);
    else all->digests[at] = all->digest(slot, all->nbytes, all->seeds[at]);
    if (all->blocks) pass_parts(&passage, all->blocks[at]);
    digest_until(&passage, all->nbytes);
    if (state) all->digests[at] = all->digester->tell(state);
    return 1;
}

// What digests a block by pieces; NULL: at once, as the cache has it anyway.
static void *begin_pieces(const struct slots *all) {
    return all->digester && all->nbytes > PIECE_BYTES ? all->digester->create() : NULL;
}

static void end_pieces(const struct slots *all, void *state) {
    if (state) all->digester->destroy(state);
}

// Help until all are taken, or others that ask are too many with us.
static void *help(void *given) {
    struct slots *all = given;
    void *state = begin_pieces(all);
    int is_one_too_many;
    do {
        is_one_too_many = change(-1, all->most);
    } while (!is_one_too_many && digest_next(all, state));
    if (!is_one_too_many) atomic_fetch_sub(&num_digesting, 1);
    end_pieces(all, state);
    return NULL;
}

static int begin_helper(pthread_t *helper, struct slots *all, pthread_attr_t *kind) {
    if (!change(1, all->most)) return 0;
    int is_begun = !pthread_create(helper, kind, help, all);
    if (!is_begun) atomic_fetch_sub(&num_digesting, 1);
    return is_begun;
}

// Do all of it on this thread, and on others where that is worth it, while no more than `most` of
// the process are at it.
static void digest_all(struct slots *all) {
    pthread_attr_t kind;
    pthread_attr_init(&kind);
    pthread_attr_setstacksize(&kind, STACK_BYTES);
    pthread_t helpers[MOST_HELPERS];
    size_t num_helpers = 0, wanted = all->nbytes * all->count / HELPED_BYTES;
    if (wanted > all->count) wanted = all->count;
    if (wanted > MOST_HELPERS + 1) wanted = MOST_HELPERS + 1;
    void *state = begin_pieces(all);
    atomic_fetch_add(&num_digesting, 1);
    do {  // others may have ended by now, and let us have more
        while (num_helpers + 1 < wanted && begin_helper(&helpers[num_helpers], all, &kind))
            num_helpers++;
    } while (digest_next(all, state));
    for (size_t at = 0; at < num_helpers; at++) pthread_join(helpers[at], NULL);
    atomic_fetch_sub(&num_digesting, 1);
    end_pieces(all, state);
    pthread_attr_destroy(&kind);
}

// Put the digest of each slot of a pool into `digests`.
void ucm_digests(digest_function *digest, const uint8_t *pool, size_t slot_bytes,
                 size_t nbytes, size_t count, const int64_t *slots,
                 const uint64_t *seeds, uint64_t *digests, int most) {
    struct slots all = {.digest = digest, .pool = pool, .slot_bytes = slot_bytes,
                        .nbytes = nbytes, .count = count, .slots = slots,
                        .seeds = seeds, .digests = digests, .most = most};
    digest_all(&all);
}

// The same, and copy each slot to the pages of its block; by pieces where there is a `digester`.
// Less than a megabyte goes through the caches, which are the reader's otherwise.
void ucm_loads(digest_function *digest, const uint8_t *pool, size_t slot_bytes,
               size_t nbytes, size_t count, const int64_t *slots, const uint64_t *seeds,
               uint64_t *digests, int most, const struct digester *digester,
               const int64_t *starts, const int64_t *strides, const int64_t *sizes,
               const int64_t *offsets, size_t num_parts, const int64_t *blocks) {
    struct slots all = {.digest = digest, .pool = pool, .slot_bytes = slot_bytes,
                        .nbytes = nbytes, .count = count, .slots = slots,
                        .seeds = seeds, .digests = digests, .most = most,
                        .is_past = nbytes * count >= PAST_BYTES, .digester = digester,
                        .parts = {starts, strides, sizes, offsets, num_parts},
                        .blocks = blocks};
    digest_all(&all);
}

// Tell the copies between pages and slots: of each block its parts, neighbours merged where
// both sides continue. Returns how many there are.
size_t ucm_pages(const int64_t *starts, const int64_t *strides, const int64_t *sizes,
                 const int64_t *offsets, size_t num_parts, const int64_t *blocks,
                 const int64_t *slots, size_t num_blocks, int64_t pool, int64_t slot_stride,
                 int64_t *pages, int64_t *places, int64_t *nbytes) {
    size_t count = 0;
    for (size_t at = 0; at < num_blocks; at++) {
        int64_t slot = pool + slots[at] * slot_stride;
        for (size_t part = 0; part < num_parts; part++) {
            int64_t page = starts[part] + blocks[at] * strides[part];
            int64_t place = slot + offsets[part];
            size_t last = count - 1;
            if (count && page == pages[last] + nbytes[last] &&
                place == places[last] + nbytes[last]) {
                nbytes[last] += sizes[part];
                continue;
            }
            pages[count] = page;
            places[count] = place;
            nbytes[count++] = sizes[part];
        }
    }
    return count;
}

// Make copies within this process's memory, one by one. Less than a megabyte goes through the
// caches, and what is `read_next`.
void ucm_moves(const uint64_t *targets, const uint64_t *sources, const uint64_t *sizes,
               size_t count, int read_next) {
    size_t whole = 0;
    for (size_t at = 0; at < count; at++) whole += sizes[at];
    for (size_t at = 0; at < count; at++)
        if (read_next || whole < PAST_BYTES)
            memcpy((void *)targets[at], (const void *)sources[at], sizes[at]);
        else
            copy_past((uint8_t *)targets[at], (const uint8_t *)sources[at], sizes[at]);
}

// Call cuMemcpyBatchAsync for `most` copies at a time; return its first error, with `begun`
// the copy that this call began with. A driver of CUDA 13 has one argument less behind the
// lists than one before; it is given nothing for the last, and does not look.
int ucm_copies(batch_function *batch, uint64_t *targets, uint64_t *sources,
               uint64_t *sizes, size_t count, size_t most, void *attributes,
               void *indexes, void *behind, void *last, size_t *begun) {
    for (*begun = 0; *begun < count; *begun += most) {
        size_t left = count - *begun, some = left < most ? left : most;
        int code = batch(targets + *begun, sources + *begun, sizes + *begun, some,
                         attributes, indexes, 1, behind, last);
        if (code) return code;
    }
    return 0;
}

// Ask for each of some events whether it is still `pending`, until one is not, `news` is no
// longer what was `seen`, or the pauses are `limit_ns` together. They double up to the longest.
void ucm_await_events(query_function *query, void *const *events, size_t count,
                      int pending, const atomic_int *news, int seen, int64_t pause_ns,
                      int64_t longest_ns, int64_t limit_ns) {
    for (int64_t spent = 0; spent < limit_ns && atomic_load(news) == seen;) {
        for (size_t at = 0; at < count; at++)
            if (query(events[at]) != pending) return;
        nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
        spent += pause_ns;
        pause_ns = 2 * pause_ns < longest_ns ? 2 * pause_ns : longest_ns;
    }
}

// Whether whoever asked has gone, and how many threads use its memory just now.
struct gate {
    atomic_int is_left, num_touching;
};

// Let nobody use a caller's memory any more; return once nobody does.
void ucm_leave(struct gate *gate) {
    atomic_store(&gate->is_left, 1);
    while (atomic_load(&gate->num_touching)) sched_yield();
}

enum { WRONG = -1, LEFT = -2, DAMAGED = -3 };  // errors beside those of the system

// Where bytes go, and what digests them once they lie there, while the CPU's cache has them.
struct sink {
    struct gate *gate;
    const struct digester *digester;
    void *state;  // NULL: they are not digested
};

// Begin to use a caller's memory, or not: one of both sides sees what the other has written first.
static int touch(struct gate *gate) {
    atomic_fetch_add(&gate->num_touching, 1);
    if (!atomic_load(&gate->is_left)) return 1;
    atomic_fetch_sub(&gate->num_touching, 1);
    return 0;
}

static void digest_part(struct sink *sink, const void *bytes, size_t nbytes) {
    if (sink->state) sink->digester->update(sink->state, bytes, nbytes);
}

static int hand_over(struct sink *sink, void *target, const void *source, size_t nbytes) {
    if (!touch(sink->gate)) return LEFT;
    memcpy(target, source, nbytes);
    digest_part(sink, target, nbytes);
    atomic_fetch_sub(&sink->gate->num_touching, 1);
    return 0;
}

static int read_at(int file, uint8_t *memory, size_t nbytes, size_t place) {
    for (size_t done = 0; done < nbytes;) {
        ssize_t got = pread(file, memory + done, nbytes - done, (off_t)(place + done));
        if (got == 0) return WRONG;
        if (got > 0) done += (size_t)got;
        else if (errno != EINTR) return errno;
    }
    return 0;
}

// Read what memory has of a part of a file, which cannot hang; what is behind a header is digested.
static size_t read_cached(int file, const struct iovec parts[2], size_t place,
                          struct sink *sink) {
    if (!touch(sink->gate)) return 0;
    ssize_t got = preadv2(file, parts, 2, (off_t)place, RWF_NOWAIT);
    size_t come = got > 0 ? (size_t)got : 0, skip = parts[0].iov_len;
    if (come > skip) digest_part(sink, parts[1].iov_base, come - skip);
    atomic_fetch_sub(&sink->gate->num_touching, 1);
    return come;
}

// Read what memory has of a file to where it belongs: at once, or piece by piece where it is
// digested. Returns how much that is; 0 where it is not all of the header.
static size_t read_straight(int file, uint8_t *header, size_t header_bytes, uint8_t *target,
                            size_t nbytes, size_t piece_bytes, struct sink *sink) {
    size_t most = sink->state ? piece_bytes : nbytes, place = 0, end;
    do {
        size_t skip = place ? 0 : header_bytes, at = place + skip - header_bytes;
        size_t some = nbytes - at < most ? nbytes - at : most;
        struct iovec parts[] = {{header, skip}, {target + at, some}};
        end = place + skip + some;
        place += read_cached(file, parts, place, sink);
    } while (place == end && end < header_bytes + nbytes);
    return place < header_bytes ? 0 : place;
}

// A file's first bytes go to `header`, the others to `target`; what may hang, by way of `piece`.
static int read_open(int file, uint8_t *header, size_t header_bytes, uint8_t *target,
                     size_t nbytes, uint8_t *piece, size_t piece_bytes, struct sink *sink) {
    struct stat is;
    while (fstat(file, &is))
        if (errno != EINTR) return errno;
    size_t whole = header_bytes + nbytes;
    if (!S_ISREG(is.st_mode) || is.st_size < 0 || (size_t)is.st_size != whole) return WRONG;
    size_t place =
        read_straight(file, header, header_bytes, target, nbytes, piece_bytes, sink);
    for (int error; place < whole;) {
        size_t some = whole - place < piece_bytes ? whole - place : piece_bytes;
        size_t skip = place ? 0 : header_bytes;
        if ((error = read_at(file, piece, some, place))) return error;
        memcpy(header, piece, skip);
        uint8_t *to = target + place + skip - header_bytes;
        if ((error = hand_over(sink, to, piece + skip, some - skip))) return error;
        place += some;
    }
    return 0;
}

// A signal that comes meanwhile, as it may on a mount over a network, changes nothing.
static int open_file(const char *path, int flags) {
    int file;
    do file = open(path, flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
    while (file < 0 && errno == EINTR);
    return file;
}

static int find_file(const char *path) {
    struct stat is;
    while (lstat(path, &is))
        if (errno != EINTR) return errno;
    return 0;
}

// Read files of just so many bytes each behind a header; a piece is longer than that. Those
// `marked` are given the present time. `errors` gets what became of each, and `digests`, where
// there is a digester, the digest of the bytes in the target of each that came whole.
void ucm_read_files(const char *const *paths, const uint8_t *marked, size_t count,
                    uint8_t *headers, size_t header_bytes, uint8_t *const *targets,
                    const size_t *sizes, uint8_t *piece, size_t piece_bytes,
                    struct gate *gate, const struct digester *digester,
                    const uint64_t *seeds, uint64_t *digests, int *errors) {
    struct sink sink = {gate, digester, digester ? digester->create() : NULL};
    for (size_t at = 0; at < count; at++) {
        errors[at] = atomic_load(&gate->is_left) ? LEFT : digester && !sink.state ? ENOMEM : 0;
        if (errors[at]) continue;
        int file = open_file(paths[at], O_RDONLY);
        errors[at] = errno;
        if (file < 0) continue;
        if (digester) digester->reset(sink.state, seeds[at]);
        errors[at] = read_open(file, headers + at * header_bytes, header_bytes, targets[at],
                               sizes[at], piece, piece_bytes, &sink);
        if (digester) digests[at] = digester->tell(sink.state);
        if (!errors[at] && marked[at]) (void)!futimens(file, NULL);
        close(file);
    }
    if (sink.state) digester->destroy(sink.state);
}

static int write_all(int file, struct iovec *part, const struct iovec *end) {
    while (part < end) {
        ssize_t done = writev(file, part, (int)(end - part));
        if (done < 0 && errno != EINTR) return errno;
        if (!done) return EIO;
        for (; part < end && done >= (ssize_t)part->iov_len; part++)
            done -= (ssize_t)part->iov_len;
        if (part < end && done > 0) {
            part->iov_base = (uint8_t *)part->iov_base + done;
            part->iov_len -= (size_t)done;
        }
    }
    return 0;
}

// Bytes behind a header, and what they are to be: each piece is digested and written while the
// CPU's cache has it.
struct source {
    uint8_t *header, *bytes;
    size_t header_bytes, nbytes;
    const struct digester *digester;
    void *state;
    uint64_t seed, digest;
};

// Fewer bytes by one call cost a file system more than memory is spared.
enum { WRITTEN_BYTES = 1 << 20 };

static int write_whole(int file, const struct source *from, struct gate *gate) {
    from->digester->reset(from->state, from->seed);
    size_t done = 0;
    do {
        if (atomic_load(&gate->is_left)) return LEFT;  // nobody wants the rest
        size_t left = from->nbytes - done, some = left < WRITTEN_BYTES ? left : WRITTEN_BYTES;
        struct iovec parts[] = {{from->header, from->header_bytes}, {from->bytes + done, some}};
        from->digester->update(from->state, from->bytes + done, some);
        int error = write_all(file, parts + (done > 0), parts + 2);
        if (error) return error;
        done += some;
    } while (done < from->nbytes);
    return from->digester->tell(from->state) == from->digest ? 0 : DAMAGED;
}

static int make_folder(const char *path) {
    return mkdir(path, 0700) && errno != EEXIST ? errno : 0;
}

// Make the folder that a file is to be in, and the one above.
static int make_folders(const char *path) {
    char folder[PATH_MAX], *end;
    if (strlen(path) >= sizeof folder) return ENAMETOOLONG;
    if (!(end = strrchr(strcpy(folder, path), '/'))) return ENOENT;
    *end = 0;
    if ((end = strrchr(folder, '/'))) {
        *end = 0;
        int error = make_folder(folder);
        if (error) return error;
        *end = '/';
    }
    return make_folder(folder);
}

// Give a whole file its name and take its first one, but not where another has the name already,
// unless the mount cannot tell.
static int give_name(const char *temporary, const char *path) {
    if (!renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_NOREPLACE)) return 0;
    int error = errno;  // EPERM: of a sandbox that knows no such call
    if (error != EINVAL && error != ENOSYS && error != EOPNOTSUPP && error != EPERM) return error;
    if (!link(temporary, path)) {
        unlink(temporary);
        return 0;
    }
    error = errno;
    int has_links = error != EPERM && error != EOPNOTSUPP && error != ENOSYS &&
                    error != EMLINK && error != EXDEV;
    return has_links ? error : rename(temporary, path) ? errno : 0;
}

// Names of a file.
enum { TEMPORARY, FINAL, NUM_NAMES };

static int publish(const char *const *names, struct gate *gate) {
    if (atomic_load(&gate->is_left)) return LEFT;  // other bytes may lie there by now
    int error = give_name(names[TEMPORARY], names[FINAL]);
    if (error == ENOENT && !(error = make_folders(names[FINAL])))
        error = give_name(names[TEMPORARY], names[FINAL]);
    return error;
}

static int write_file(const char *const *names, const struct source *from, struct gate *gate) {
    int file = open_file(names[TEMPORARY], O_WRONLY | O_CREAT | O_EXCL);
    if (file < 0) return errno == EEXIST ? WRONG : errno;
    int error = write_whole(file, from, gate);
    if (close(file) && !error) error = errno;  // some mounts tell then that they are full
    if (!error) error = publish(names, gate);
    if (error) unlink(names[TEMPORARY]);
    return error;
}

// Write files, each a header and what is behind it, under their first names, then give those
// whose bytes have their digest the last. `errors` gets what became of each; EEXIST: it was there.
void ucm_write_files(const char *const *names, size_t count, uint8_t *headers,
                     size_t header_bytes, uint8_t *const *sources, const size_t *sizes,
                     struct gate *gate, const struct digester *digester,
                     const uint64_t *seeds, const uint64_t *digests, int *errors) {
    struct source from = {.header_bytes = header_bytes, .digester = digester,
                          .state = digester->create()};
    for (size_t at = 0; at < count; at++, names += NUM_NAMES) {
        errors[at] = atomic_load(&gate->is_left) ? LEFT : find_file(names[FINAL]) ? 0 : EEXIST;
        if (!errors[at] && !from.state) errors[at] = ENOMEM;
        if (errors[at]) continue;
        from.header = headers + at * header_bytes;
        from.bytes = sources[at];
        from.nbytes = sizes[at];
        from.seed = seeds[at];
        from.digest = digests[at];
        errors[at] = write_file(names, &from, gate);
    }
    if (from.state) digester->destroy(from.state);
}

// Look for files, and follow no links; `errors` gets 0 for each that is there.
void ucm_find_files(const char *const *paths, size_t count, int *errors) {
    for (size_t at = 0; at < count; at++) errors[at] = find_file(paths[at]);
}

// A connection, what it has brought that nobody wanted so far, and the error that has ended it.
struct incoming {
    int link;
    uint8_t *held;
    size_t room, num_held;
    int error;
};

// Read up to `most` bytes, or all of them; 0, with the error, where none come any more.
static size_t receive(struct incoming *from, uint8_t *memory, size_t most, int flags) {
    for (;;) {
        ssize_t got = recv(from->link, memory, most, flags);
        if (got > 0) return (size_t)got;
        from->error = got ? errno : ECONNRESET;
        if (!got || errno != EINTR) return 0;
    }
}

static void drop(struct incoming *from, size_t nbytes) {
    from->num_held -= nbytes;
    memmove(from->held, from->held + nbytes, from->num_held);
}

// Whether these bytes come next; then they are read. Others are held.
static int comes(struct incoming *from, const char *bytes, size_t nbytes) {
    for (;;) {
        size_t some = from->num_held < nbytes ? from->num_held : nbytes;
        if (memcmp(from->held, bytes, some)) return 0;
        if (some == nbytes) break;
        size_t got = receive(from, from->held + from->num_held, from->room - from->num_held, 0);
        if (!got) return 0;
        from->num_held += got;
    }
    drop(from, nbytes);
    return 1;
}

static int fill(struct incoming *from, uint8_t *memory, size_t nbytes) {
    size_t done = from->num_held < nbytes ? from->num_held : nbytes;
    memcpy(memory, from->held, done);
    drop(from, done);
    while (done < nbytes) {
        size_t got = receive(from, memory + done, nbytes - done, MSG_WAITALL);
        if (!got) return 0;
        done += got;
    }
    return 1;
}

// Read frames from a connection that blocks: of each a prefix, its parts, and a suffix, which
// are shorter than the room of what is held. Returns how many came; the next one is another,
// and what came of it is held, or there is an error: amid a frame it is a wrong one, or the end.
size_t ucm_receive(int link, size_t count, const char *const *prefixes,
                   const size_t *prefix_bytes, const size_t *num_parts, uint8_t *const *parts,
                   const size_t *sizes, const char *suffix, size_t suffix_bytes, uint8_t *held,
                   size_t room, size_t *num_held, int *error) {
    struct incoming from = {.link = link, .held = held, .room = room, .num_held = *num_held};
    size_t at = 0, part = 0;
    for (; at < count && comes(&from, prefixes[at], prefix_bytes[at]); at++) {
        size_t end = part + num_parts[at];
        while (part < end && fill(&from, parts[part], sizes[part])) part++;
        if (part == end && comes(&from, suffix, suffix_bytes)) continue;
        if (!from.error) from.error = EPROTO;
        break;
    }
    *num_held = from.num_held;
    *error = from.error;
    return at;
}
