// SPDX-License-Identifier: GPL-2.0
/*
 * Frames come to the surface.
 *
 * An entry that is none is changed by a single atomic operation and without a lock, for runs of
 * pages as well: the core does not write such entries, and of several who bring a frame one wins.
 *
 * A processor does not remember that a page was not there. So nothing is flushed, unless a page
 * showed zeros before.
 */

#include <linux/mm.h>
#include <linux/sched.h>

#include "exmap/exmap.h"
#include "trace.h"

/* What a thread that allocates has in its hands. */
struct allocation {
	struct exmap		*exmap;
	unsigned int		index;
	struct frame_lane	*lane;
	struct frame_bundle	bundle;
	bool			over_zeros;
};

/* Brings a frame to the page, if it has none. False: there is no memory for it. */
static __always_inline bool alloc_leaf(struct allocation *allocation, u64 *leaf, u64 page,
				       struct exmap_result *result)
{
	struct exmap *exmap = allocation->exmap;
	bool placed, is_huge;
	u64 frame;

	if (unlikely(!leaf)) {
		leaf = exmap_make_leaf(exmap, page, &is_huge);
		if (!leaf)
			return is_huge;
	}
	if (exmap_has_frame(exmap, READ_ONCE(*leaf)))
		return true;
	frame = frame_take(&exmap->pool, allocation->lane, &allocation->bundle);
	if (unlikely(!frame))
		return false;
	placed = exmap_place(exmap, leaf, page, frame, &allocation->over_zeros);
	while (unlikely(!placed && !exmap_has_frame(exmap, READ_ONCE(*leaf)))) {
		if (!exmap_wait(exmap, leaf, page) || fatal_signal_pending(current))
			break;
		placed = exmap_place(exmap, leaf, page, frame, &allocation->over_zeros);
	}
	if (unlikely(!placed)) {
		frame_take_back(&exmap->pool, allocation->lane, &allocation->bundle, frame);
		return true;
	}
	result->pages++;
	/* At once: frames that nobody is known to have would be waited for when there are no more. */
	allocation->lane->taken++;
	return true;
}

static struct exmap_result alloc_small(struct allocation *allocation, struct page_range range)
{
	struct exmap_result result = {};
	u64 *leaf = NULL;

	for (; range.count && !result.error && exmap_may_go_on(range.page);
	     range.page++, range.count--) {
		leaf = exmap_next_leaf(leaf, range.page) ?:
		       pt_tree_make_leaf(&allocation->exmap->tree, range.page);
		if (!alloc_leaf(allocation, leaf, range.page, &result))
			result.error = -ENOMEM;
	}
	return result;
}

/* The pages up to where 2 MiB begin, or all. */
static struct page_range up_to_extent(struct page_range range)
{
	unsigned int before = -range.page % PT_ENTRIES ?: PT_ENTRIES;

	range.count = min(range.count, before);
	return range;
}

/* A range in a surface with blocks: each 2 MiB of it as a whole if that can be, or by pages. */
static noinline struct exmap_result alloc_parts(struct allocation *allocation,
						struct page_range range)
{
	struct exmap_result result = {}, small;
	struct page_range part;
	bool is_there;

	while (range.count && !result.error && exmap_may_go_on(range.page)) {
		part = up_to_extent(range);
		is_there = false;
		small = (struct exmap_result){};
		if (exmap_is_extent(allocation->exmap, part))
			small.pages = exmap_alloc_huge(allocation->exmap, allocation->index,
						       part.page, &is_there);
		if (!small.pages && !is_there)
			small = alloc_small(allocation, part);
		result.pages += small.pages;
		result.error = small.error;
		range.page += part.count;
		range.count -= part.count;
	}
	return result;
}

static noinline struct exmap_result alloc_run(struct allocation *allocation,
					      struct page_range range)
{
	struct exmap_result result;

	if (unlikely(allocation->exmap->pool.blocks))
		return alloc_parts(allocation, range);
	result = alloc_small(allocation, range);
	cond_resched();
	return result;
}

static __always_inline void begin(struct allocation *allocation, struct exmap *exmap,
				  unsigned int index, unsigned int ranges)
{
	*allocation = (struct allocation){ .exmap = exmap, .index = index,
					   .lane = &exmap->pool.lanes[index] };
	frame_take_begin(&exmap->pool, allocation->lane, &allocation->bundle, ranges);
}

/* A range, which is empty if it is not within the surface. */
static __always_inline struct exmap_result alloc_one(struct allocation *allocation,
						     struct exmap_interface *interface,
						     struct page_range range)
{
	struct exmap_result result = {};
	u64 *leaf;

	if (likely(range.count == 1)) {
		leaf = pt_tree_make_leaf(&allocation->exmap->tree, range.page);
		if (unlikely(!alloc_leaf(allocation, leaf, range.page, &result)))
			result.error = -ENOMEM;
	} else {
		result = alloc_run(allocation, range);
	}
	if (unlikely(!result.error && result.pages != range.count))
		interface->conflicts += range.count - result.pages;
	return result;
}

static void end(struct allocation *allocation, struct exmap_interface *interface)
{
	frame_take_end(&allocation->exmap->pool, allocation->lane, &allocation->bundle);
	if (unlikely(allocation->over_zeros))
		exmap_flush_zeros(allocation->exmap, interface, current->mm);
}

void exmap_alloc(struct exmap *exmap, unsigned int index, const struct page_range *ranges,
		 struct exmap_result *results, unsigned int count)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct allocation allocation;
	unsigned int i;

	begin(&allocation, exmap, index, count);
	for (i = 0; i < count; i++)
		results[i] = alloc_one(&allocation, interface, ranges[i]);
	end(&allocation, interface);
}

/* Usually the page has no frame, the lane has one, and nothing is in the way. */
struct exmap_result exmap_alloc_page(struct exmap *exmap, unsigned int index, u64 page)
{
	struct frame_lane *lane = &exmap->pool.lanes[index];
	u64 *leaf = pt_tree_leaf(&exmap->tree, page);
	struct page_range range = { page, 1 };
	struct exmap_result result = {};
	bool over_zeros = false;
	u64 frame;

	if (likely(leaf && !READ_ONCE(*leaf))) {
		frame = frame_take_one(&exmap->pool, lane);
		if (unlikely(!frame)) {
			result.error = -ENOMEM;
			return result;
		}
		if (likely(exmap_place(exmap, leaf, page, frame, &over_zeros))) {
			lane->taken++;
			result.pages = 1;
			if (unlikely(over_zeros))
				exmap_flush_zeros(exmap, &exmap->interface[index], current->mm);
			return result;
		}
		frame_take_back_one(&exmap->pool, lane, frame);
	}
	exmap_alloc(exmap, index, &range, &result, 1);
	return result;
}

static noinline long alloc_vector(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct allocation allocation;
	struct page_range range;
	u64 before, *entry;
	long failed = 0;

	begin(&allocation, exmap, index, entries);
	before = allocation.lane->taken;
	for (entry = interface->vector; entry < interface->vector + entries; entry++) {
		range = exmap_decode(exmap, READ_ONCE(*entry));
		WRITE_ONCE(*entry, exmap_encode(interface, range,
						alloc_one(&allocation, interface, range),
						&failed));
	}
	trace_exmap_alloc(index, entries, allocation.lane->taken - before);
	end(&allocation, interface);
	return failed;
}

/* Ranges of the interface's vector; returns how many entries have an error. */
long exmap_alloc_vector(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct exmap_result result;
	struct page_range range;
	long failed = 0;

	if (entries != 1)
		return alloc_vector(exmap, index, entries);
	range = exmap_decode(exmap, READ_ONCE(*interface->vector));
	if (likely(range.count == 1))
		result = exmap_alloc_page(exmap, index, range.page);
	else
		exmap_alloc(exmap, index, &range, &result, 1);
	WRITE_ONCE(*interface->vector, exmap_encode(interface, range, result, &failed));
	trace_exmap_alloc(index, entries, result.pages);
	return failed;
}
