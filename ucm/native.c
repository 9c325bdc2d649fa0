// SPDX-License-Identifier: Apache-2.0
//
// Many calls of a native function by one call from Python: see native.py. Knows nothing of
// what it calls, and needs no header of Python's or of anybody else's.

#include <stddef.h>
#include <stdint.h>

typedef uint64_t digest_function(const void *, size_t, uint64_t);
typedef int batch_function(uint64_t *, uint64_t *, uint64_t *, size_t, void *, void *,
                           size_t, void *, void *);

// Raise it with each change of the functions below: native.py takes no other.
int ucm_version(void) { return 1; }

// Put the digest of each slot of a pool into `digests`.
void ucm_digests(digest_function *digest, const uint8_t *pool, size_t slot_bytes,
                 size_t nbytes, size_t count, const int64_t *slots,
                 const uint64_t *seeds, uint64_t *digests) {
    for (size_t at = 0; at < count; at++)
        digests[at] = digest(pool + (size_t)slots[at] * slot_bytes, nbytes, seeds[at]);
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
