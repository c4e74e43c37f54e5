// SPDX-License-Identifier: GPL-2.0
/*
 * Frames come to the surface.
 *
 * Entries of page tables change by single atomic operations, for runs of pages as well: an entry
 * changed under the table's lock by a plain store could undo what somebody else does to it without.
 * Each change has one winner, who has the frame.
 *
 * A processor does not remember that a page was not there. So nothing is flushed, unless a page
 * showed zeros before.
 */

#include <linux/mm.h>
#include <linux/sched.h>
#include <asm/tlbflush.h>

#include "core/pt_flush.h"
#include "exmap/exmap.h"
#include "trace.h"

/* What a thread that allocates has in its hands. */
struct allocation {
	struct exmap		*exmap;
	struct frame_lane	*lane;
	struct frame_bundle	bundle;
	bool			over_zeros;
};

static __always_inline struct exmap_result alloc_range(struct allocation *allocation,
						       struct page_range range)
{
	struct exmap *exmap = allocation->exmap;
	struct exmap_result result = {};
	u64 *leaf = NULL, frame;

	for (; range.count; range.page++, range.count--) {
		leaf = exmap_next_leaf(leaf, range.page) ?:
		       pt_tree_make_leaf(&exmap->tree, range.page);
		if (unlikely(!leaf)) {
			result.error = -ENOMEM;
			break;
		}
		if (exmap_has_frame(exmap, READ_ONCE(*leaf)))
			continue;
		frame = frame_take(&exmap->pool, allocation->lane, &allocation->bundle);
		if (unlikely(!frame)) {
			result.error = -ENOMEM;
			break;
		}
		if (likely(exmap_place(exmap, leaf, range.page, frame, &allocation->over_zeros)))
			result.pages++;
		else
			frame_take_back(&exmap->pool, allocation->lane, &allocation->bundle,
					frame);
	}
	return result;
}

/* Other processors may remember that pages showed zeros. */
void exmap_flush_zeros(struct exmap_interface *interface, struct mm_struct *mm)
{
	pt_flush_range(mm, 0, TLB_FLUSH_ALL);
	interface->flushes++;
}

void exmap_alloc(struct exmap *exmap, unsigned int index, const struct page_range *ranges,
		 struct exmap_result *results, unsigned int count)
{
	struct allocation allocation = { .exmap = exmap, .lane = &exmap->pool.lanes[index] };
	struct exmap_interface *interface = &exmap->interface[index];
	u64 before = allocation.lane->taken;
	unsigned int i;

	frame_take_begin(&exmap->pool, allocation.lane, &allocation.bundle, count);
	for (i = 0; i < count; i++) {
		results[i] = alloc_range(&allocation, ranges[i]);
		allocation.lane->taken += results[i].pages;
		if (unlikely(!results[i].error && results[i].pages != ranges[i].count))
			interface->conflicts += ranges[i].count - results[i].pages;
		if (unlikely(ranges[i].count > 1))
			cond_resched();
	}
	frame_take_end(&exmap->pool, allocation.lane, &allocation.bundle);
	trace_exmap_alloc(index, count, allocation.lane->taken - before);
	if (unlikely(allocation.over_zeros))
		exmap_flush_zeros(interface, current->mm);
}
