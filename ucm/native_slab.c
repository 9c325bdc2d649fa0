// SPDX-License-Identifier: Apache-2.0
//
// What is done to a slab's index by one call each: see ucm/stores/slab/_quick.py for when, and
// the modules beside it for what each step is for. Memory is shared: every number that was read
// there is held against its bound before it is used as a place.

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// A store behind which a death may come: what stands before it was done then, and nothing else.
#ifndef PUT
#define MAY_DIE
#define PUT(place, value) \
    (__atomic_store_n(&(place), (value), __ATOMIC_RELEASE), atomic_signal_fence(memory_order_seq_cst))
#endif

#define NO_SLOT (-1)
#define NEVER INT64_MAX
#define DECLINED (-1)

enum { FREE, RESERVED, COMMITTED, NUM_COUNTED };
enum { GROUP = 256, MOST = 4096, AT_ONCE = 1024, MOST_NEAR = 32, KEY_BYTES = 88 };
enum { LONGEST = 1 << 16 };  // of a chain, if memory is in order: hashes are seeded
_Static_assert(sizeof(void *) == 8, "addresses and numbers are given side by side");
enum { REMOVED, STORED };
enum {
    VERSION = 2, GENERATION, PUBLISHING, NUM_FREE, NUM_COMMITTED, NUM_RESERVED, NUM_EVICTED,
    JOURNAL = 14, JOURNAL_TENANTS, FREE_GROUP, JOURNAL_LEAVING = 19, CHANGES
};

struct record {
    uint32_t unused, owner;
    uint64_t generation, nbytes, checksum, hash;
    uint8_t key[KEY_BYTES];
};

// Where the arrays of an index are, and how long; see _layout.py.
struct index {
    int64_t *words, *journal;
    uint16_t *tally;
    int64_t *bounds, *uppers;
    int32_t *heads, *nexts;
    uint8_t *states;
    uint16_t *payers;
    int64_t *stamps;
    uint8_t *change_kinds;
    struct record *changes, *records;
    int64_t num_slots, num_groups, num_uppers, num_buckets, num_changes;
};

// What is put down of blocks that go, and where.
struct fates {
    uint64_t *checks, *values;
    uint64_t mask, value;
};

static int is_slot(const struct index *index, int64_t slot) {
    return slot >= 0 && slot < index->num_slots;
}

static int32_t *head_of(const struct index *index, uint64_t hash) {
    return index->heads + (hash & (uint64_t)(index->num_buckets - 1));
}

// Return the linked slot of a key. A chain that changes meanwhile may seem endless.
static int64_t find(const struct index *index, const uint8_t *key, uint64_t hash) {
    int64_t slot = __atomic_load_n(head_of(index, hash), __ATOMIC_ACQUIRE);
    for (int64_t steps = 0; is_slot(index, slot) && steps < LONGEST; steps++) {
        const struct record *record = index->records + slot;
        if (record->hash == hash && !memcmp(record->key, key, KEY_BYTES)) return slot;
        slot = __atomic_load_n(index->nexts + slot, __ATOMIC_ACQUIRE);
    }
    return NO_SLOT;
}

// What is looked for at random places of memory comes from there while others are looked at.
static void prefetch(const struct index *index, const uint64_t *hashes, size_t count) {
    for (size_t at = 0; at < count; at++) __builtin_prefetch(head_of(index, hashes[at]));
    for (size_t at = 0; at < count; at++) {
        int64_t slot = *head_of(index, hashes[at]);
        if (!is_slot(index, slot)) continue;
        for (int line = 0; line < 128; line += 64)
            __builtin_prefetch((const char *)(index->records + slot) + line);
    }
}

typedef uint64_t digest_function(const void *, size_t, uint64_t);

// Hash keys as they stand in records, behind each of which is its length.
void ucm_slab_hash(digest_function *digest, const uint8_t *keys, size_t count, uint64_t seed,
                   uint64_t *hashes) {
    for (const uint8_t *key = keys; count--; key += KEY_BYTES)
        *hashes++ = digest(key, key[KEY_BYTES - 1], seed);
}

// Find keys: the slot of each, NO_SLOT for none.
void ucm_slab_find(const struct index *index, const uint8_t *keys, const uint64_t *hashes,
                   size_t count, int64_t *slots) {
    enum { AHEAD = 32 };
    atomic_thread_fence(memory_order_seq_cst);  // who asks has looked at the version, and will
    for (size_t at = 0; at < count; at++) {
        if (at % AHEAD == 0)
            prefetch(index, hashes + at, count - at < AHEAD ? count - at : AHEAD);
        slots[at] = find(index, keys + at * KEY_BYTES, hashes[at]);
    }
    atomic_thread_fence(memory_order_seq_cst);
}

// Find keys; also what their slots hold, and whether that is committed: copies of records, slots,
// and a byte each, one array behind the other.
void ucm_slab_look(const struct index *index, const uint8_t *keys, const uint64_t *hashes,
                   size_t count, struct record *records) {
    int64_t *slots = (int64_t *)(records + count);
    uint8_t *committed = (uint8_t *)(slots + count);
    ucm_slab_find(index, keys, hashes, count, slots);
    for (size_t at = 0; at < count; at++) {
        committed[at] = slots[at] != NO_SLOT && index->states[slots[at]] == COMMITTED;
        if (slots[at] == NO_SLOT) continue;
        records[at] = index->records[slots[at]];
        committed[at] &= !memcmp(records[at].key, keys + at * KEY_BYTES, KEY_BYTES);
    }
    atomic_thread_fence(memory_order_seq_cst);
}

static int by_number(const void *one, const void *other) {
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

static int is_among(const int64_t *sorted, size_t count, int64_t number) {
    return count && bsearch(&number, sorted, count, sizeof number, by_number);
}

// Return how many free slots were found of those that are wanted: as `Tally.find_free`.
static size_t find_free(const struct index *index, size_t wanted, int64_t *slots) {
    const uint16_t *free_in = index->tally;
    int64_t *words = index->words, group = words[FREE_GROUP], most = 0;
    if (words[NUM_FREE] < (int64_t)wanted) wanted = words[NUM_FREE] < 0 ? 0 : words[NUM_FREE];
    if (!wanted) return 0;
    if (group < 0 || group >= index->num_groups || free_in[group] < wanted) {
        for (int64_t at = group = 0; at < index->num_groups; at++)
            if (free_in[at] > most) most = free_in[group = at];
    }
    int is_one = free_in[group] >= wanted;
    size_t found = 0;
    if (is_one) words[FREE_GROUP] = group;
    for (group = is_one ? group : 0; group < index->num_groups; group++) {
        const uint8_t *states = index->states + group * GROUP;
        for (int at = 0; free_in[group] && at < GROUP; at++) {
            if (states[at] != FREE || !is_slot(index, group * GROUP + at)) continue;
            slots[found++] = group * GROUP + at;
            if (found == wanted) return found;
        }
    }
    return found;
}

// The stamps of a group, of which those that were looked at are gone.
struct near {
    int64_t group, low, stamps[GROUP];
    int column;
};

static void find_low(struct near *near) {
    near->low = NEVER;
    for (int at = 0; at < GROUP; at++)
        if (near->stamps[at] < near->low) near->low = near->stamps[near->column = at];
}

static int is_near(const struct near *near, int count, int64_t group) {
    while (count--)
        if (near[count].group == group) return 1;
    return 0;
}

// Return the lowest bound of groups that are not near, and whose it is.
static int64_t lowest(const struct index *index, const struct near *near, int count,
                      int64_t *group) {
    int64_t low = NEVER;
    for (int64_t chunk = 0; chunk < index->num_uppers; chunk++) {
        if (index->uppers[chunk] >= low) continue;
        int64_t last = (chunk + 1) * GROUP;
        if (last > index->num_groups) last = index->num_groups;
        for (int64_t at = chunk * GROUP; at < last; at++)
            if (index->bounds[at] < low && !is_near(near, count, at))
                low = index->bounds[*group = at];
    }
    return low;
}

// Look at a group's stamps, and raise its bounds to what is there.
static void come_near(const struct index *index, struct near *near, int64_t group) {
    int64_t chunk = group / GROUP, low = NEVER;
    near->group = group;
    memcpy(near->stamps, index->stamps + group * GROUP, sizeof near->stamps);
    find_low(near);
    PUT(index->bounds[group], near->low);
    for (int64_t at = chunk * GROUP; at < (chunk + 1) * GROUP; at++)
        if (index->bounds[at] < low) low = index->bounds[at];
    PUT(index->uppers[chunk], low);
}

// Find the oldest slots, each older than the key that gets it, and none that is held or paid for.
// Returns how many there are, fewer than wanted also if there is too much to look at.
static size_t find_oldest(const struct index *index, const int64_t *times, size_t wanted,
                          const int64_t *held, size_t num_held, int64_t *slots) {
    struct near near[MOST_NEAR];
    int num_near = 0;
    size_t found = 0;
    int64_t group = 0, limit = lowest(index, near, 0, &group);
    while (found < wanted) {
        struct near *oldest = near;
        for (int at = 1; at < num_near; at++)
            if (near[at].low < oldest->low) oldest = near + at;
        if (!num_near || oldest->low > limit) {
            if (limit >= times[found] || num_near == MOST_NEAR) return found;
            come_near(index, near + num_near++, group);
            limit = lowest(index, near, num_near, &group);
            continue;
        }
        if (oldest->low >= times[found]) return found;
        int64_t slot = oldest->group * GROUP + oldest->column;
        oldest->stamps[oldest->column] = NEVER;
        find_low(oldest);
        if (!is_slot(index, slot)) return found;
        if (index->states[slot] != COMMITTED)
            PUT(index->stamps[slot], NEVER);  // it was touched while it went
        else if (index->payers[slot])
            return found;
        else if (!is_among(held, num_held, slot))
            slots[found++] = slot;
    }
    return found;
}

// Write down which slots a change is about, nobody's, and tell readers that it begins.
static void begin(const struct index *index, const int64_t *slots, size_t count) {
    for (size_t at = 0; at < count; at++) PUT(index->journal[at], slots[at]);
    PUT(index->words[JOURNAL], (int64_t)count);
    PUT(index->words[JOURNAL_LEAVING], 0);
    PUT(index->words[JOURNAL_TENANTS], 0);
    PUT(index->words[VERSION], index->words[VERSION] | 1);
    atomic_thread_fence(memory_order_seq_cst);
}

// Count the groups of slots, ascending, again; the change is over.
static void end(const struct index *index, const int64_t *slots, size_t count) {
    static const int words[] = {NUM_FREE, NUM_RESERVED, NUM_COMMITTED};
    int64_t last = -1;
    for (size_t at = 0; at < count; at++) {
        int64_t group = slots[at] / GROUP;
        if (group == last) continue;
        last = group;
        uint16_t counts[NUM_COUNTED] = {0};
        const uint8_t *states = index->states + group * GROUP;
        for (int state = 0; state < NUM_COUNTED; state++)
            for (int each = 0; each < GROUP; each++) counts[state] += states[each] == state;
        for (int state = 0; state < NUM_COUNTED; state++) {
            uint16_t *was = index->tally + state * index->num_groups + group;
            PUT(index->words[words[state]],
                index->words[words[state]] + counts[state] - *was);
            PUT(*was, counts[state]);
        }
    }
    atomic_thread_fence(memory_order_seq_cst);
    PUT(index->words[VERSION], index->words[VERSION] + 1);
}

// Write down what slots hold, for who follows the slab.
static void tell(const struct index *index, uint8_t kind, const int64_t *slots, size_t count) {
    int64_t sequence = index->words[CHANGES];
    for (size_t at = 0; at < count; at++, sequence++) {
        int64_t place = sequence & (index->num_changes - 1);
        PUT(index->change_kinds[place], kind);
        index->changes[place] = index->records[slots[at]];
    }
    PUT(index->words[CHANGES], sequence);
}

static void unlink_slot(const struct index *index, int64_t slot) {
    int32_t *place = head_of(index, index->records[slot].hash);
    for (int64_t steps = 0; steps < LONGEST; steps++) {
        int32_t linked = *place;
        if (linked == slot) PUT(*place, index->nexts[slot]);
        if (linked == slot || !is_slot(index, linked)) return;
        place = index->nexts + linked;
    }
}

// Put down that blocks go, tell so, and take them out of everything.
static void evict(const struct index *index, const int64_t *slots, size_t count,
                  const struct fates *fates) {
    for (size_t at = 0; fates && at < count; at++) {
        uint64_t hash = index->records[slots[at]].hash;
        PUT(fates->values[hash & fates->mask], fates->value);
        PUT(fates->checks[hash & fates->mask], hash ^ fates->value);
    }
    tell(index, REMOVED, slots, count);
    for (size_t at = 0; at < count; at++) PUT(index->states[slots[at]], FREE);
    for (size_t at = 0; at < count; at++) PUT(index->stamps[slots[at]], NEVER);
    for (size_t at = 0; at < count; at++) unlink_slot(index, slots[at]);
    PUT(index->words[NUM_EVICTED], index->words[NUM_EVICTED] + (int64_t)count);
}

// Keys that want slots, and when they count as used: the latest moment at which any does if
// `moments` is NULL, the others a nanosecond before each other. What counts as used less than
// `slack` later than a key gives way to it all the same.
struct wishes {
    const int64_t *moments;
    int64_t count, latest, slack;
    uint64_t nbytes, owner;
};

// What was granted: positions, slots, and moments at which blocks count as used.
struct grant {
    int64_t generation, num_stored;
    int64_t positions[AT_ONCE], slots[AT_ONCE], moments[AT_ONCE];
};

static int64_t moment_of(const struct wishes *wishes, int64_t at) {
    return wishes->moments ? wishes->moments[at] : wishes->latest - at;
}

// Take a slot for each key that has none, with the lock held. Returns how many these are;
// DECLINED, with no more changed than where to look first, if some cannot have one so easily.
int64_t ucm_slab_reserve(const struct index *index, const uint8_t *keys, const uint64_t *hashes,
                         const struct wishes *wishes, const struct fates *fates,
                         struct grant *grant) {
    MAY_DIE
    int64_t held[AT_ONCE], found[AT_ONCE], times[AT_ONCE], *victims, *words = index->words;
    size_t wanted = 0, num_held = 0, num_free, num_victims;
    if (wishes->count < 0 || wishes->count > AT_ONCE) return DECLINED;
    ucm_slab_find(index, keys, hashes, wishes->count, found);
    for (int64_t at = 0; at < wishes->count; at++) {
        if (at && moment_of(wishes, at) > moment_of(wishes, at - 1)) return DECLINED;
        if (found[at] == NO_SLOT)
            grant->positions[wanted++] = at;
        else if (index->states[found[at]] == COMMITTED)
            held[num_held++] = found[at];
        else
            return DECLINED;  // whoever writes it may be gone
    }
    grant->num_stored = (int64_t)num_held;
    grant->generation = 0;
    if (!wanted) return 0;
    num_free = find_free(index, wanted, grant->slots);
    num_victims = wanted - num_free;
    victims = grant->slots + num_free;
    for (size_t at = 0; at < wanted; at++) {
        grant->moments[at] = moment_of(wishes, grant->positions[at]);
        times[at] = grant->moments[at] + wishes->slack;
    }
    if (num_victims) {
        qsort(held, num_held, sizeof *held, by_number);
        if (find_oldest(index, times + num_free, num_victims, held, num_held, victims) <
            num_victims)
            return DECLINED;
    }
    PUT(words[GENERATION], words[GENERATION] + 1);
    grant->generation = words[GENERATION];
    begin(index, grant->slots, wanted);
    if (num_victims) evict(index, victims, num_victims, fates);
    qsort(grant->slots, wanted, sizeof *grant->slots, by_number);
    for (size_t at = 0; at < wanted; at++) {
        int64_t slot = grant->slots[at], position = grant->positions[at];
        struct record *record = index->records + slot;
        *record = (struct record){.owner = (uint32_t)wishes->owner,
                                  .generation = (uint64_t)grant->generation,
                                  .nbytes = wishes->nbytes,
                                  .hash = hashes[position]};
        memcpy(record->key, keys + position * KEY_BYTES, KEY_BYTES);
        PUT(index->payers[slot], 0);
        PUT(index->states[slot], RESERVED);
    }
    for (size_t at = wanted; at-- > 0;) {  // the first one stands in front
        int64_t slot = grant->slots[at];
        int32_t *head = head_of(index, index->records[slot].hash);
        PUT(index->nexts[slot], *head);
        PUT(*head, (int32_t)slot);
    }
    end(index, grant->slots, wanted);
    return (int64_t)wanted;
}

// Let the bounds allow for a stamp, before it is written.
static void lower(const struct index *index, int64_t group, int64_t stamp) {
    if (stamp >= index->bounds[group]) return;
    if (stamp < index->uppers[group / GROUP]) PUT(index->uppers[group / GROUP], stamp);
    PUT(index->bounds[group], stamp);
}

// Make slots, ascending, visible in one step, with the lock held. Returns whether all were ours;
// nothing has changed if not.
int ucm_slab_publish(const struct index *index, const int64_t *slots, const int64_t *moments,
                     const uint64_t *checksums, size_t count, uint64_t generation,
                     uint32_t owner) {
    MAY_DIE
    if (count > MOST) return 0;
    for (size_t at = 0; at < count; at++) {
        if (!is_slot(index, slots[at]) || index->states[slots[at]] != RESERVED) return 0;
        const struct record *record = index->records + slots[at];
        if (record->generation != generation || record->owner != owner) return 0;
    }
    begin(index, slots, count);
    for (size_t at = 0; at < count; at++)
        PUT(index->records[slots[at]].checksum, checksums[at]);
    for (size_t at = 0; at < count; at++) {
        lower(index, slots[at] / GROUP, moments[at]);
        PUT(index->stamps[slots[at]], moments[at]);
    }
    PUT(index->words[PUBLISHING], (int64_t)generation);
    for (size_t at = 0; at < count; at++) PUT(index->states[slots[at]], COMMITTED);
    PUT(index->words[PUBLISHING], 0);
    tell(index, STORED, slots, count);
    end(index, slots, count);
    return 1;
}
