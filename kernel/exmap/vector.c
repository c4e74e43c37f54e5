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

struct page_range {
	u64		page;
	unsigned int	count;
};

/* What a vector has taken off and not yet flushed. */
struct cleared {
	u64		first, last;
	bool		any;
};

static bool decode(const struct exmap *exmap, u64 entry, struct page_range *range)
{
	range->page = entry & ((1ULL << 52) - 1);
	range->count = entry >> 52;
	return range->count && range->page < exmap->tree.pages &&
	       range->count <= exmap->tree.pages - range->page;
}

static u64 encode(int error, unsigned int pages)
{
	return (u32)error | (u64)pages << 32;
}

/* Pages of the range that lie in the same table as its first. */
static unsigned int in_table(const struct page_range *range)
{
	return min_t(unsigned int, range->count, PT_ENTRIES - (range->page & (PT_ENTRIES - 1)));
}

/* Puts a frame on a page. False: another one is there. */
static bool place(struct exmap *exmap, u64 *leaf, u64 page, u64 frame, bool *was_zeros)
{
	u64 old = READ_ONCE(*leaf);

	if (old && old != exmap->zero_leaf)
		return false;
	if (!try_cmpxchg64(leaf, &old, frame << PAGE_SHIFT | exmap->leaf_flags))
		return false;
	*was_zeros |= old != 0;
	pt_mount_leaf_changed(&exmap->mount, page);
	return true;
}

static bool is_free(struct exmap *exmap, u64 leaf)
{
	return !leaf || leaf == exmap->zero_leaf;
}

static int alloc_range(struct exmap *exmap, struct frame_lane *lane, struct frame_bundle *bundle,
		       struct page_range range, unsigned int *done, bool *was_zeros)
{
	unsigned int run, i;
	u64 *leaf, frame;

	while (range.count) {
		leaf = pt_tree_make_leaf(&exmap->tree, range.page);
		if (!leaf)
			return -ENOMEM;
		run = in_table(&range);
		for (i = 0; i < run; i++) {
			if (!is_free(exmap, READ_ONCE(leaf[i])))
				continue;
			frame = frame_take(&exmap->pool, lane, bundle);
			if (!frame)
				return -ENOMEM;
			if (place(exmap, leaf + i, range.page + i, frame, was_zeros))
				(*done)++;
			else
				frame_take_back(&exmap->pool, bundle, frame);
		}
		range.page += run;
		range.count -= run;
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
	struct frame_lane *lane = &exmap->pool.lanes[index];
	struct frame_bundle bundle;
	bool was_zeros = false;
	long failed = 0;
	unsigned int i;

	if (mutex_lock_killable(&interface->lock))
		return -EINTR;
	frame_take_begin(&exmap->pool, lane, &bundle);
	for (i = 0; i < entries; i++) {
		u64 *entry = &interface->vector[i];
		struct page_range range;
		unsigned int done = 0;
		int error = -EINVAL;

		if (decode(exmap, READ_ONCE(*entry), &range)) {
			error = alloc_range(exmap, lane, &bundle, range, &done, &was_zeros);
			if (!error)
				interface->conflicts += range.count - done;
			cond_resched();
		}
		lane->taken += done;
		failed += error != 0;
		WRITE_ONCE(*entry, encode(error, done));
	}
	frame_take_end(&exmap->pool, lane, &bundle);
	if (was_zeros) {
		pt_flush_range(current->mm, 0, TLB_FLUSH_ALL);
		interface->flushes++;
	}
	mutex_unlock(&interface->lock);
	return failed;
}

static void flush(struct exmap *exmap, unsigned int index, struct cleared *cleared)
{
	unsigned long start = exmap->mount.start;

	if (!cleared->any)
		return;
	if (cleared->last - cleared->first < FLUSH_PAGES)
		pt_flush_range(current->mm, start + (cleared->first << PAGE_SHIFT),
			       start + ((cleared->last + 1) << PAGE_SHIFT));
	else
		pt_flush_range(current->mm, 0, TLB_FLUSH_ALL);
	frame_settle(&exmap->pool, &exmap->pool.lanes[index], exmap->pinnable);
	exmap->interface[index].flushes++;
	cleared->any = false;
}

/* Takes a page's frame off: its number; 0 if there is none, or it must stay. */
static u64 take_off(struct exmap *exmap, u64 *leaf, u64 page, bool *is_busy)
{
	u64 old = READ_ONCE(*leaf);

	do {
		if (is_free(exmap, old))
			return 0;
		if (exmap->pinnable && page_ref_count(pfn_to_page(pt_leaf_pfn(old))) != 1) {
			*is_busy = true;
			return 0;
		}
	} while (!try_cmpxchg64(leaf, &old, 0));
	pt_mount_leaf_changed(&exmap->mount, page);
	return pt_leaf_pfn(old);
}

static void note(struct cleared *cleared, u64 page)
{
	if (!cleared->any)
		cleared->first = cleared->last = page;
	cleared->any = true;
	cleared->first = min(cleared->first, page);
	cleared->last = max(cleared->last, page);
}

static unsigned int free_range(struct exmap *exmap, unsigned int index, struct page_range range,
			       struct cleared *cleared, bool *is_busy)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct frame_lane *lane = &exmap->pool.lanes[index];
	unsigned int run, i, done = 0;
	u64 *leaf, frame;

	for (; range.count; range.page += run, range.count -= run) {
		run = in_table(&range);
		leaf = pt_tree_leaf(&exmap->tree, range.page);
		for (i = 0; leaf && i < run; i++) {
			bool stays = false;

			frame = take_off(exmap, leaf + i, range.page + i, &stays);
			if (stays) {
				interface->busy++;
				*is_busy = true;
			}
			if (!frame)
				continue;
			done++;
			note(cleared, range.page + i);
			if (frame_pend(&exmap->pool, lane, frame))
				flush(exmap, index, cleared);
		}
	}
	return done;
}

/* As exmap_alloc. The frames are free when this returns, and TLBs were flushed before. */
long exmap_free(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct frame_lane *lane = &exmap->pool.lanes[index];
	struct cleared cleared = {};
	long failed = 0;
	unsigned int i;

	if (mutex_lock_killable(&interface->lock))
		return -EINTR;
	for (i = 0; i < entries; i++) {
		u64 *entry = &interface->vector[i];
		struct page_range range;
		unsigned int done = 0;
		bool is_busy = false;
		int error = -EINVAL;

		if (decode(exmap, READ_ONCE(*entry), &range)) {
			done = free_range(exmap, index, range, &cleared, &is_busy);
			error = is_busy ? -EBUSY : 0;
			cond_resched();
		}
		lane->given += done;
		failed += error != 0;
		WRITE_ONCE(*entry, encode(error, done));
		if (exmap->flags & VELLUM_EXMAP_FLUSH_EACH)
			flush(exmap, index, &cleared);
	}
	flush(exmap, index, &cleared);
	mutex_unlock(&interface->lock);
	return failed;
}
