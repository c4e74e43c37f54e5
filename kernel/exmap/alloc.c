// SPDX-License-Identifier: GPL-2.0
/*
 * Frames come to the surface.
 *
 * A single atomic operation changes an entry that is none, without a lock, for runs of pages as
 * well. The core does not write such entries. Of several threads that bring a frame one wins.
 *
 * A CPU does not cache that a page was not there. So nothing is flushed, unless a page showed zeros
 * before.
 */

#include <linux/mm.h>
#include <linux/sched.h>

#include "exmap/exmap.h"
#include "trace.h"

/* The state of a thread that allocates. */
struct exmap_allocation {
	struct exmap		*exmap;
	unsigned int		index;
	struct frame_lane	*lane;
	struct frame_bundle	bundle;
	unsigned int		zeros;	/* EXMAP_ZEROS_* */
};

/* Brings a frame to the page, if it has none. False: there is no memory for it. */
static __always_inline bool exmap_alloc_leaf(struct exmap_allocation *allocation, pteval_t *leaf,
					     u64 page, struct exmap_result *result)
{
	struct exmap *exmap = allocation->exmap;
	bool placed, is_huge;
	u64 frame;

	if (unlikely(!leaf)) {
		leaf = exmap_make_leaf(exmap, page, &is_huge);
		if (!leaf)
			return is_huge;
	}
	if (exmap_has_frame(exmap, READ_ONCE(*leaf))) {
		exmap_found(exmap, &allocation->zeros);
		return true;
	}
	frame = frame_take(&exmap->pool, allocation->lane, &allocation->bundle);
	if (unlikely(!frame))
		return false;
	placed = exmap_place(exmap, leaf, page, frame, &allocation->zeros);
	while (unlikely(!placed && !exmap_has_frame(exmap, READ_ONCE(*leaf)))) {
		if (!exmap_wait(exmap, leaf, page) || fatal_signal_pending(current))
			break;
		placed = exmap_place(exmap, leaf, page, frame, &allocation->zeros);
	}
	if (unlikely(!placed)) {
		exmap_found(exmap, &allocation->zeros);
		frame_take_back(&exmap->pool, allocation->lane, &allocation->bundle, frame);
		return true;
	}
	result->pages++;
	/*
	 * Counted at once: when there are no more frames, threads wait for those that are not known
	 * to be in use.
	 */
	allocation->lane->taken++;
	return true;
}

static struct exmap_result exmap_alloc_small(struct exmap_allocation *allocation,
					     struct exmap_range range)
{
	struct exmap_result result = {};
	pteval_t *leaf = NULL;

	for (; range.count && !result.error && exmap_may_go_on(range.page);
	     range.page++, range.count--) {
		leaf = exmap_next_leaf(leaf, range.page) ?:
		       pt_tree_make_leaf(&allocation->exmap->tree, range.page);
		if (!exmap_alloc_leaf(allocation, leaf, range.page, &result))
			result.error = -ENOMEM;
	}
	return result;
}

/* The pages up to where an extent of 2 MiB begins, or all. */
static struct exmap_range exmap_up_to_extent(struct exmap_range range)
{
	unsigned int before = -range.page % PT_ENTRIES ?: PT_ENTRIES;

	range.count = min(range.count, before);
	return range;
}

/*
 * Allocates a range in a surface with blocks: each extent of 2 MiB as a whole if possible, or by
 * pages.
 */
static noinline struct exmap_result exmap_alloc_parts(struct exmap_allocation *allocation,
						      struct exmap_range range)
{
	struct exmap_result result = {}, small;
	struct exmap_range part;
	bool is_there;

	while (range.count && !result.error && exmap_may_go_on(range.page)) {
		part = exmap_up_to_extent(range);
		is_there = false;
		small = (struct exmap_result){};
		if (exmap_is_extent(allocation->exmap, part))
			small.pages = exmap_alloc_huge(allocation->exmap, allocation->index,
						       part.page, &is_there);
		if (!small.pages && !is_there)
			small = exmap_alloc_small(allocation, part);
		result.pages += small.pages;
		result.error = small.error;
		range.page += part.count;
		range.count -= part.count;
	}
	return result;
}

static noinline struct exmap_result exmap_alloc_run(struct exmap_allocation *allocation,
						    struct exmap_range range)
{
	struct exmap_result result;

	if (unlikely(allocation->exmap->pool.blocks))
		return exmap_alloc_parts(allocation, range);
	result = exmap_alloc_small(allocation, range);
	cond_resched();
	return result;
}

static __always_inline void exmap_alloc_begin(struct exmap_allocation *allocation,
					      struct exmap *exmap, unsigned int index,
					      unsigned int ranges)
{
	*allocation = (struct exmap_allocation){ .exmap = exmap, .index = index,
					   .lane = &exmap->pool.lanes[index] };
	frame_take_begin(&exmap->pool, allocation->lane, &allocation->bundle, ranges);
}

/* Allocates a range. A range that is not within the surface is empty. */
static __always_inline struct exmap_result exmap_alloc_one(struct exmap_allocation *allocation,
							   struct exmap_interface *interface,
							   struct exmap_range range)
{
	struct exmap_result result = {};
	pteval_t *leaf;

	if (likely(range.count == 1)) {
		leaf = pt_tree_make_leaf(&allocation->exmap->tree, range.page);
		if (unlikely(!exmap_alloc_leaf(allocation, leaf, range.page, &result)))
			result.error = -ENOMEM;
	} else {
		result = exmap_alloc_run(allocation, range);
	}
	if (unlikely(!result.error && result.pages != range.count))
		interface->conflicts += range.count - result.pages;
	return result;
}

static void exmap_alloc_end(struct exmap_allocation *allocation, struct exmap_interface *interface)
{
	frame_take_end(&allocation->exmap->pool, allocation->lane, &allocation->bundle);
	if (unlikely(allocation->zeros))
		exmap_flush_zeros(allocation->exmap, interface, current->mm, allocation->zeros);
}

void exmap_alloc(struct exmap *exmap, unsigned int index, const struct exmap_range *ranges,
		 struct exmap_result *results, unsigned int count)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct exmap_allocation allocation;
	unsigned int i;

	exmap_alloc_begin(&allocation, exmap, index, count);
	for (i = 0; i < count; i++)
		results[i] = exmap_alloc_one(&allocation, interface, ranges[i]);
	exmap_alloc_end(&allocation, interface);
}

/* In the common case the page has no frame, the lane has one, and no other thread interferes. */
struct exmap_result exmap_alloc_page(struct exmap *exmap, unsigned int index, u64 page)
{
	struct frame_lane *lane = &exmap->pool.lanes[index];
	pteval_t *leaf = pt_tree_leaf(&exmap->tree, page);
	struct exmap_range range = { page, 1 };
	struct exmap_result result = {};
	unsigned int zeros = 0;
	bool placed;
	u64 frame;

	if (likely(leaf && !READ_ONCE(*leaf))) {
		frame = frame_take_one(&exmap->pool, lane);
		if (unlikely(!frame)) {
			result.error = -ENOMEM;
			return result;
		}
		placed = exmap_place(exmap, leaf, page, frame, &zeros);
		if (unlikely(zeros))
			exmap_flush_zeros(exmap, &exmap->interface[index], current->mm, zeros);
		if (likely(placed)) {
			lane->taken++;
			result.pages = 1;
			return result;
		}
		frame_take_back_one(&exmap->pool, lane, frame);
	}
	exmap_alloc(exmap, index, &range, &result, 1);
	return result;
}

static noinline long __exmap_alloc_vector(struct exmap *exmap, unsigned int index,
					  unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct exmap_allocation allocation;
	struct exmap_range range;
	u64 before, *entry;
	long failed = 0;

	exmap_alloc_begin(&allocation, exmap, index, entries);
	before = allocation.lane->taken;
	for (entry = interface->vector; entry < interface->vector + entries; entry++) {
		range = exmap_decode(exmap, READ_ONCE(*entry));
		WRITE_ONCE(*entry, exmap_encode(interface, range,
						exmap_alloc_one(&allocation, interface, range),
						&failed));
	}
	trace_exmap_alloc(index, entries, allocation.lane->taken - before);
	exmap_alloc_end(&allocation, interface);
	return failed;
}

/* Allocates the ranges of the interface's vector. Returns the number of entries with an error. */
long exmap_alloc_vector(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct exmap_result result;
	struct exmap_range range;
	long failed = 0;

	if (entries != 1)
		return __exmap_alloc_vector(exmap, index, entries);
	range = exmap_decode(exmap, READ_ONCE(*interface->vector));
	if (likely(range.count == 1))
		result = exmap_alloc_page(exmap, index, range.page);
	else
		exmap_alloc(exmap, index, &range, &result, 1);
	WRITE_ONCE(*interface->vector, exmap_encode(interface, range, result, &failed));
	trace_exmap_alloc(index, entries, result.pages);
	return failed;
}
