/* A ledger of the C heap, preloaded into the ranks: how many bytes are handed out now, and at most since a mark.
 *
 * It sees every thread and every library: tensors, what gloo stages in C++, and frees that happen on gloo's threads, which the
 * profiler does not see. Blocks below SMALLEST bytes are left out: no tensor that matters is among them, and the
 * interpreter's own objects are. Works on top of glibc and its MALLOC_ settings.
 */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

#define SMALLEST 4096

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long live, peak;

static void *added(void *block) {
    long size = block ? (long)malloc_usable_size(block) : 0;
    if (size >= SMALLEST) {
        long now = atomic_fetch_add(&live, size) + size;
        long high = atomic_load(&peak);
        while (now > high && !atomic_compare_exchange_weak(&peak, &high, now)) {}
    }
    return block;
}

static void removed(void *block) {
    long size = block ? (long)malloc_usable_size(block) : 0;
    if (size >= SMALLEST) atomic_fetch_sub(&live, size);
}

void *malloc(size_t size) { return added(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return added(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    if (!block) return ENOMEM;
    *out = added(block);
    return 0;
}

void *realloc(void *old, size_t size) {
    long before = old ? (long)malloc_usable_size(old) : 0;
    void *block = __libc_realloc(old, size);
    if ((block || size == 0) && before >= SMALLEST) atomic_fetch_sub(&live, before);
    return added(block);
}

void free(void *block) {
    removed(block);
    __libc_free(block);
}

long heap_live(void) { return atomic_load(&live); }
long heap_peak(void) { return atomic_load(&peak); }
void heap_mark(void) { atomic_store(&peak, atomic_load(&live)); }
