// SPDX-License-Identifier: GPL-2.0
/*
 * Frames leave the surface: entries are cleared, TLBs are flushed once, and then the frames are
 * free. What something has pinned stays where it is.
 */

#include <linux/mm.h>
#include <linux/sched.h>
#include <asm/tlbflush.h>

#include "core/pt_flush.h"
#include "exmap/exmap.h"
#include "trace.h"

/* As the kernel's own bound: beyond so many pages all translations are flushed. */
#define FLUSH_PAGES	33

/* What a thread that frees has taken off and not yet flushed. */
struct clearance {
	struct exmap		*exmap;
	struct frame_lane	*lane;
	struct exmap_interface	*interface;
	u64			first, last;	/* pages; first > last: none */
	bool			pins;		/* pages may be pinned */
};

bool exmap_may_be_pinned(struct exmap *exmap)
{
	return exmap->pinnable || atomic_read(&exmap->holders);
}

/* Flushes translations of the pages from first to last. */
void exmap_flush(struct exmap *exmap, u64 first, u64 last)
{
	unsigned long start = exmap->mount.start;

	if (last - first < FLUSH_PAGES)
		pt_flush_range(current->mm, start + (first << PAGE_SHIFT),
			       start + ((last + 1) << PAGE_SHIFT));
	else
		pt_flush_range(current->mm, 0, TLB_FLUSH_ALL);
}

static void flush(struct clearance *clearance)
{
	struct exmap *exmap = clearance->exmap;

	if (clearance->first > clearance->last)
		return;
	exmap_flush(exmap, clearance->first, clearance->last);
	/* Who began to hold pages since we looked is seen now, or has seen that they are gone. */
	smp_mb();
	frame_settle(&exmap->pool, clearance->lane, exmap_may_be_pinned(exmap));
	clearance->interface->flushes++;
	clearance->first = U64_MAX;
	clearance->last = 0;
}

/* Takes a page's frame off: its number; 0 if there is none, or it must stay. */
static __always_inline u64 take_off(struct exmap *exmap, u64 *leaf, u64 page, bool pins, bool *busy)
{
	u64 old = READ_ONCE(*leaf);
	bool cleared = false;
	spinlock_t *lock;

	if (!exmap_has_frame(exmap, old))
		return 0;
	if (pins && page_ref_count(pfn_to_page(pt_leaf_pfn(old))) != 1) {
		*busy = true;
		return 0;
	}
	lock = exmap_lock_table(exmap, leaf);
	while (exmap_has_frame(exmap, old) && !cleared)
		cleared = try_cmpxchg64(leaf, &old, 0);
	exmap_unlock_table(lock);
	if (!cleared)
		return 0;
	pt_mount_leaf_changed(&exmap->mount, page);
	return pt_leaf_pfn(old);
}

u64 exmap_take_off(struct exmap *exmap, u64 *leaf, u64 page, bool pins, bool *busy)
{
	return take_off(exmap, leaf, page, pins, busy);
}

static __always_inline struct exmap_result free_range(struct clearance *clearance,
						      struct page_range range)
{
	struct exmap *exmap = clearance->exmap;
	struct exmap_result result = {};
	u64 *leaf = NULL, frame;
	bool busy;

	for (; range.count; range.page++, range.count--) {
		leaf = exmap_next_leaf(leaf, range.page) ?:
		       pt_tree_leaf(&exmap->tree, range.page);
		if (unlikely(!leaf))
			continue;
		busy = false;
		frame = take_off(exmap, leaf, range.page, clearance->pins, &busy);
		if (unlikely(busy)) {
			clearance->interface->busy++;
			result.error = -EBUSY;
		}
		if (!frame)
			continue;
		result.pages++;
		clearance->first = min(clearance->first, range.page);
		clearance->last = max(clearance->last, range.page);
		if (frame_pend(&exmap->pool, clearance->lane, frame))
			flush(clearance);
	}
	return result;
}

static __always_inline void begin(struct clearance *clearance, struct exmap *exmap,
				  unsigned int index)
{
	*clearance = (struct clearance){
		.exmap = exmap,
		.lane = &exmap->pool.lanes[index],
		.interface = &exmap->interface[index],
		.first = U64_MAX,
		.pins = exmap_may_be_pinned(exmap),
	};
}

/* A range, which is empty if it is not within the surface. */
static __always_inline struct exmap_result free_one(struct clearance *clearance,
						    struct page_range range)
{
	struct exmap_result result = free_range(clearance, range);

	clearance->lane->given += result.pages;
	if (unlikely(clearance->exmap->flags & VELLUM_EXMAP_FLUSH_EACH))
		flush(clearance);
	if (unlikely(range.count > 1))
		cond_resched();
	return result;
}

void exmap_free(struct exmap *exmap, unsigned int index, const struct page_range *ranges,
		struct exmap_result *results, unsigned int count)
{
	struct clearance clearance;
	unsigned int i;

	begin(&clearance, exmap, index);
	for (i = 0; i < count; i++)
		results[i] = free_one(&clearance, ranges[i]);
	flush(&clearance);
}

/* The same for the interface's vector; returns how many entries have an error. */
long exmap_free_vector(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct clearance clearance;
	struct page_range range;
	u64 before, *entry;
	long failed = 0;

	begin(&clearance, exmap, index);
	before = clearance.lane->given;
	for (entry = interface->vector; entry < interface->vector + entries; entry++) {
		range = exmap_decode(exmap, READ_ONCE(*entry));
		WRITE_ONCE(*entry, exmap_encode(range, free_one(&clearance, range), &failed));
	}
	flush(&clearance);
	trace_exmap_free(index, entries, clearance.lane->given - before);
	return failed;
}
