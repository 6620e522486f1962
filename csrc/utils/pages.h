/* pages.h: memory from the system, anonymous on the pages that serve it or a piece of a file, and the way back.
 *
 * A mapping is zero, reserved at once, and costs memory page by page when first written. A page that cannot be touched lies on
 * either side, so that a stray access is a fault and the system's own table (smaps) shows each mapping apart from its neighbours.
 *
 * Memory that a pass writes from end to end (`dense`) asks for huge pages, which need fewer entries in the CPU's table of
 * addresses:
 *   hugetlb   the system's pool of huge pages (MAP_HUGETLB); only when COLIBRI_HUGE_PAGES=hugetlb asks for it. The pool is
 *             filled by an administrator (vm.nr_hugepages), so a page taken is one that nobody else can have. All pages are
 *             written here at once, by a call that fails where a later write would end the process (MADV_POPULATE_WRITE).
 *   madvise   transparent huge pages (MADV_HUGEPAGE), the default: the first write to each 2 MiB takes and clears 2 MiB
 *   plain     the system's ordinary pages: COLIBRI_HUGE_PAGES=off, or neither of the above can be had
 * History that may stay untouched for long, and anything smaller than a huge page, is plain: there a huge page would mostly be
 * memory for rows that nobody has written. COLIBRI_HUGE_PAGES=all takes transparent huge pages for history too: up to 2 MiB more
 * memory for each tap of each layer, for a few percent of a token's time when the keys and values of thousands of tokens are
 * read. */
#ifndef COLIBRI_PAGES_H
#define COLIBRI_PAGES_H

#include <stddef.h>

#include "status.h"

typedef struct pages {
    unsigned char *data;
    int64_t n_bytes;       /* what was asked for, rounded up to whole pages of page_bytes */
    colibri_page_kind kind;
    int64_t page_bytes;    /* of the kind in force */
    const char *why;       /* a phrase: why these pages */
    void *reserved;        /* data and the guards around it: what goes back to the system */
    size_t n_reserved;
} pages;

colibri_status pages_map(int64_t n_bytes, bool dense, pages *out, colibri_message *message);

/* n_bytes of an open file from `offset` on, a multiple of the page size: written by whoever writes the memory, and shared. The file
 * must hold them, rounded up to whole pages; the descriptor may be closed afterwards. */
colibri_status pages_map_file(int64_t n_bytes, int file, int64_t offset, pages *out, colibri_message *message);

void pages_unmap(const pages *p);

/* munmap for everything in the engine: one that fails leaves its memory mapped, which is counted. */
void pages_give_back(void *data, size_t n_bytes);
void pages_failures(int64_t *n_failed, int64_t *n_bytes);

#endif
