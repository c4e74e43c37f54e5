// SPDX-License-Identifier: GPL-2.0
/*
 * ALLOC and FREE.
 *
 * Entries of page tables change by single atomic operations, for runs of pages as well: an entry
 * changed under the table's lock by a plain store could undo what somebody else does to it without.
 * Each change has one winner, who has the frame.
 */

#include <linux/mm.h>
#include <linux/sched.h>
#include <asm/tlbflush.h>

#include "core/pt_flush.h"
#include "exmap/exmap.h"

/* As the kernel's own bound: beyond so many pages all translations are flushed. */
#define FLUSH_PAGES	33

/* Pages between two offers to let others run. */
#define PATIENCE	4096

struct page_range {
	u64		page;
	unsigned int	count;
};

static __always_inline bool decode(const struct exmap *exmap, u64 entry, struct page_range *range)
{
	range->page = entry & ((1ULL << 52) - 1);
	range->count = entry >> 52;
	return range->count && range->page < exmap->tree.pages &&
	       range->count <= exmap->tree.pages - range->page;
}

static __always_inline u64 encode(int error, unsigned int pages)
{
	return (u32)error | (u64)pages << 32;
}

static __always_inline bool has_frame(const struct exmap *exmap, u64 leaf)
{
	return leaf && leaf != exmap->zero_leaf;
}

/* The next page's leaf: beside the last one, or in another table. */
static __always_inline u64 *next_leaf(u64 *leaf, u64 page)
{
	return leaf && (page & (PT_ENTRIES - 1)) ? leaf + 1 : NULL;
}

/* What a thread that allocates has in its hands. */
struct allocation {
	struct exmap		*exmap;
	struct frame_lane	*lane;
	struct frame_bundle	bundle;
	bool			over_zeros;	/* a page that showed zeros has a frame now */
};

/* Puts a frame on the page. False: it has one. */
static __always_inline bool place(struct allocation *allocation, u64 *leaf, u64 page, u64 frame)
{
	struct exmap *exmap = allocation->exmap;
	u64 old = READ_ONCE(*leaf);

	do {
		if (has_frame(exmap, old))
			return false;
	} while (!try_cmpxchg64(leaf, &old, frame << PAGE_SHIFT | exmap->leaf_flags));
	allocation->over_zeros |= old != 0;
	pt_mount_leaf_changed(&exmap->mount, page);
	return true;
}

static __always_inline int alloc_range(struct allocation *allocation, struct page_range range,
				       unsigned int *done)
{
	struct exmap *exmap = allocation->exmap;
	u64 *leaf = NULL, frame;

	for (; range.count; range.page++, range.count--) {
		leaf = next_leaf(leaf, range.page) ?: pt_tree_make_leaf(&exmap->tree, range.page);
		if (unlikely(!leaf))
			return -ENOMEM;
		if (has_frame(exmap, READ_ONCE(*leaf)))
			continue;
		frame = frame_take(&exmap->pool, allocation->lane, &allocation->bundle);
		if (unlikely(!frame))
			return -ENOMEM;
		if (likely(place(allocation, leaf, range.page, frame)))
			(*done)++;
		else
			frame_take_back(&exmap->pool, &allocation->bundle, frame);
	}
	return 0;
}

/*
 * Carries out the interface's vector; returns how many entries have an error. A processor does not
 * remember that a page was not there, so nothing is flushed, unless a page showed zeros.
 */
long exmap_alloc(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct allocation allocation = { .exmap = exmap, .lane = &exmap->pool.lanes[index] };
	unsigned int i, since = 0;
	long failed = 0;

	if (mutex_lock_killable(&interface->lock))
		return -EINTR;
	frame_take_begin(&exmap->pool, allocation.lane, &allocation.bundle);
	for (i = 0; i < entries; i++) {
		struct page_range range;
		unsigned int done = 0;
		int error = -EINVAL;

		if (likely(decode(exmap, READ_ONCE(interface->vector[i]), &range))) {
			error = alloc_range(&allocation, range, &done);
			allocation.lane->taken += done;
			if (unlikely(!error && done != range.count))
				interface->conflicts += range.count - done;
			since += range.count;
		}
		failed += error != 0;
		WRITE_ONCE(interface->vector[i], encode(error, done));
		if (unlikely(since >= PATIENCE)) {
			since = 0;
			cond_resched();
		}
	}
	frame_take_end(&exmap->pool, allocation.lane, &allocation.bundle);
	if (allocation.over_zeros) {
		pt_flush_range(current->mm, 0, TLB_FLUSH_ALL);
		interface->flushes++;
	}
	mutex_unlock(&interface->lock);
	return failed;
}

/* What a thread that frees has taken off and not yet flushed. */
struct clearance {
	struct exmap		*exmap;
	struct frame_lane	*lane;
	struct exmap_interface	*interface;
	u64			first, last;	/* pages; first > last: none */
};

static void flush(struct clearance *clearance)
{
	struct exmap *exmap = clearance->exmap;
	unsigned long start = exmap->mount.start;

	if (clearance->first > clearance->last)
		return;
	if (clearance->last - clearance->first < FLUSH_PAGES)
		pt_flush_range(current->mm, start + (clearance->first << PAGE_SHIFT),
			       start + ((clearance->last + 1) << PAGE_SHIFT));
	else
		pt_flush_range(current->mm, 0, TLB_FLUSH_ALL);
	frame_settle(&exmap->pool, clearance->lane, exmap->pinnable);
	clearance->interface->flushes++;
	clearance->first = U64_MAX;
	clearance->last = 0;
}

/* Takes a page's frame off: its number; 0 if there is none, or it must stay. */
static __always_inline u64 take_off(struct clearance *clearance, u64 *leaf, u64 page, bool *busy)
{
	struct exmap *exmap = clearance->exmap;
	u64 old = READ_ONCE(*leaf);

	do {
		if (!has_frame(exmap, old))
			return 0;
		if (exmap->pinnable && page_ref_count(pfn_to_page(pt_leaf_pfn(old))) != 1) {
			clearance->interface->busy++;
			*busy = true;
			return 0;
		}
	} while (!try_cmpxchg64(leaf, &old, 0));
	pt_mount_leaf_changed(&exmap->mount, page);
	return pt_leaf_pfn(old);
}

static __always_inline int free_range(struct clearance *clearance, struct page_range range,
				      unsigned int *done)
{
	struct exmap *exmap = clearance->exmap;
	u64 *leaf = NULL, frame;
	bool busy = false;

	for (; range.count; range.page++, range.count--) {
		leaf = next_leaf(leaf, range.page) ?: pt_tree_leaf(&exmap->tree, range.page);
		if (unlikely(!leaf))
			continue;
		frame = take_off(clearance, leaf, range.page, &busy);
		if (!frame)
			continue;
		(*done)++;
		clearance->first = min(clearance->first, range.page);
		clearance->last = max(clearance->last, range.page);
		if (frame_pend(&exmap->pool, clearance->lane, frame))
			flush(clearance);
	}
	return busy ? -EBUSY : 0;
}

/* As exmap_alloc. When this returns, TLBs were flushed, and then the frames became free. */
long exmap_free(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct clearance clearance = {
		.exmap = exmap,
		.lane = &exmap->pool.lanes[index],
		.interface = interface,
		.first = U64_MAX,
	};
	unsigned int i, since = 0;
	long failed = 0;

	if (mutex_lock_killable(&interface->lock))
		return -EINTR;
	for (i = 0; i < entries; i++) {
		struct page_range range;
		unsigned int done = 0;
		int error = -EINVAL;

		if (likely(decode(exmap, READ_ONCE(interface->vector[i]), &range))) {
			error = free_range(&clearance, range, &done);
			clearance.lane->given += done;
			since += range.count;
		}
		failed += error != 0;
		WRITE_ONCE(interface->vector[i], encode(error, done));
		if (unlikely(exmap->flags & VELLUM_EXMAP_FLUSH_EACH))
			flush(&clearance);
		if (unlikely(since >= PATIENCE)) {
			since = 0;
			cond_resched();
		}
	}
	flush(&clearance);
	mutex_unlock(&interface->lock);
	return failed;
}
