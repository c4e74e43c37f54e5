// SPDX-License-Identifier: GPL-2.0
/*
 * Frames leave the surface: entries are cleared, TLBs are flushed once, and then the frames are
 * free. What something has pinned stays where it is.
 */

#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/sched.h>

#include "exmap/exmap.h"
#include "trace.h"

/* How long a command waits at most for what holds pages; nanoseconds. */
#define PATIENCE	NSEC_PER_MSEC

/* What a thread that frees has taken off and not yet flushed. */
struct clearance {
	struct exmap		*exmap;
	struct frame_lane	*lane;
	struct exmap_interface	*interface;
	u64			**leaving;	/* the interface's, for as many pages as follows */
	unsigned int		pages;
	unsigned int		extents;	/* of 2 MiB; their pages are not among those */
	u64			first, last;	/* while there are few */
	bool			pins;		/* pages may be pinned */
	u64			deadline;	/* until when to wait for what holds them, or 0 */
	bool			is_impatient;	/* that is over */
};

/* Flushes where 2 MiB have been taken off by an entry, and opens their tables. */
static noinline void flush_extents(struct clearance *clearance)
{
	const struct exmap_extent *extents = clearance->interface->extents;
	struct exmap *exmap = clearance->exmap;
	unsigned int i;

	if (clearance->extents == 1 && !clearance->pages)
		exmap_flush_extent(exmap, current->mm, extents->page);
	else
		exmap_flush_all(exmap, current->mm);
	for (i = 0; i < clearance->extents; i++)
		pt_huge_open(&exmap->mount, extents[i].page);
}

static noinline void give_extents(struct clearance *clearance)
{
	const struct exmap_extent *extent = clearance->interface->extents;

	clearance->lane->given += (u64)clearance->extents * FRAME_BLOCK;
	clearance->lane->block_given += (u64)clearance->extents * FRAME_BLOCK;
	for (; clearance->extents; clearance->extents--, extent++)
		frame_block_give(&clearance->exmap->pool, extent->frame);
}

static void flush(struct clearance *clearance)
{
	u64 **leaf = clearance->leaving, **end = leaf + clearance->pages;
	struct exmap *exmap = clearance->exmap;

	if (!(clearance->pages | clearance->extents))
		return;
	if (unlikely(clearance->extents))
		flush_extents(clearance);
	else if (clearance->pages <= EXMAP_FLUSH_PAGES)
		exmap_flush(exmap, current->mm, clearance->first, clearance->last);
	else
		exmap_flush_all(exmap, current->mm);
	while (leaf < end)
		WRITE_ONCE(**leaf++, 0);
	clearance->lane->given += clearance->pages;
	frame_settle(&exmap->pool, clearance->lane);
	clearance->interface->flushes++;
	clearance->pages = 0;
	if (unlikely(clearance->extents))
		give_extents(clearance);
}

/*
 * Takes a page's frame off: its number; 0 if there is none; EXMAP_HELD if something holds it, and
 * such pages stay. The entry is leaving until the caller has flushed and made it none.
 *
 * Under the lock of the table, unlike what puts frames on. A thread whose access failed before the
 * frame came finds it there in the core's fault handler, which then writes the entry as it has read
 * it: under this lock, and without looking once more. What was taken off meanwhile would be back.
 * And what takes a reference through an entry does it under this lock, so that none is taken later.
 */
static __always_inline u64 take_off(struct exmap *exmap, u64 *leaf, u64 page, bool pins)
{
	u64 old = READ_ONCE(*leaf);
	spinlock_t *lock;

	if (unlikely(!exmap_has_frame(exmap, old))) {
		/* Claimed: it is leaving, or coming, with all 2 MiB. Splitting: it is there. */
		if (old == PT_SPLITTING)
			old = exmap_wait_for_split(leaf);
		if (!exmap_has_frame(exmap, old))
			return 0;
	}
	if (unlikely(pins) && frame_is_held(pfn_to_page(pt_leaf_pfn(old))))
		return EXMAP_HELD;
	lock = pt_table_lock(leaf);
	spin_lock(lock);
	old = READ_ONCE(*leaf);
	if (likely(exmap_has_frame(exmap, old)))
		xchg(leaf, EXMAP_LEAVING);
	else
		old = 0;
	spin_unlock(lock);
	exmap_leaf_changed(exmap, page);
	return pt_leaf_pfn(old);
}

u64 exmap_take_off(struct exmap *exmap, u64 *leaf, u64 page, bool pins)
{
	return take_off(exmap, leaf, page, pins);
}

static __always_inline void note(struct clearance *clearance, u64 page)
{
	if (likely(clearance->pages++ >= EXMAP_FLUSH_PAGES))
		return;
	if (clearance->pages == 1)
		clearance->first = clearance->last = page;
	clearance->first = min(clearance->first, page);
	clearance->last = max(clearance->last, page);
}

/* Whether something holds a page of the range. */
static bool is_held(struct exmap *exmap, struct page_range range)
{
	unsigned int pages;
	u64 frame;

	for (; range.count && exmap_may_go_on(range.page); range.page += pages, range.count -= pages) {
		pages = 1;
		frame = exmap_frame(exmap, range.page);
		if (frame && frame_is_held(pfn_to_page(frame)))
			return true;
		if (!frame && !pt_tree_leaf(&exmap->tree, range.page))
			pages = exmap_rest_of_table(range.page, range.count);
	}
	return false;
}

/*
 * Whether something goes on holding a page of the range. The end of direct I/O wakes the waiter a
 * little before it lets go of the pages. So the command waits a moment, for all entries together.
 */
static noinline bool stays_held(struct clearance *clearance, struct page_range range)
{
	if (clearance->is_impatient)
		return true;
	/* Others wait for pages that are leaving. */
	flush(clearance);
	if (!clearance->deadline)
		clearance->deadline = ktime_get_ns() + PATIENCE;
	while (is_held(clearance->exmap, range)) {
		if (ktime_get_ns() >= clearance->deadline || fatal_signal_pending(current)) {
			clearance->is_impatient = true;
			return true;
		}
		usleep_range(10, 50);
	}
	return false;
}

static __always_inline void free_leaf(struct clearance *clearance, u64 *leaf, u64 page,
				      struct exmap_result *result)
{
	u64 frame = take_off(clearance->exmap, leaf, page, clearance->pins);

	if (unlikely(frame == EXMAP_HELD) && !stays_held(clearance, (struct page_range){ page, 1 }))
		frame = exmap_take_off(clearance->exmap, leaf, page, false);
	if (unlikely(frame == EXMAP_HELD)) {
		clearance->interface->busy++;
		result->error = -EBUSY;
		return;
	}
	if (!frame)
		return;
	result->pages++;
	clearance->leaving[clearance->pages] = leaf;
	note(clearance, page);
	if (frame_pend(clearance->lane, frame))
		flush(clearance);
}

/* Takes 2 MiB off by one entry, if they are mapped by one. */
static bool free_extent(struct clearance *clearance, u64 page)
{
	u64 frame = pt_huge_take_off(&clearance->exmap->mount, page);

	if (!frame)
		return false;
	clearance->interface->extents[clearance->extents++] = (struct exmap_extent){ page, frame };
	if (clearance->extents == EXMAP_EXTENTS)
		flush(clearance);
	return true;
}

/*
 * All of it goes, or none of it: to its owner it may be a single page. What something begins to hold
 * after the look goes, too, and its frame is kept aside.
 */
static noinline struct exmap_result free_run(struct clearance *clearance, struct page_range range)
{
	struct exmap_result result = {};
	bool pins = clearance->pins;
	unsigned int pages;
	u64 *leaf = NULL;

	if (pins && is_held(clearance->exmap, range) && stays_held(clearance, range)) {
		clearance->interface->busy++;
		result.error = -EBUSY;
		return result;
	}
	clearance->pins = false;
	for (; range.count && exmap_may_go_on(range.page); range.page += pages, range.count -= pages) {
		if (exmap_is_extent(clearance->exmap, range) &&
		    free_extent(clearance, range.page)) {
			pages = PT_ENTRIES;
			result.pages += pages;
			leaf = NULL;
			continue;
		}
		pages = 1;
		leaf = exmap_next_leaf(leaf, range.page) ?:
		       pt_tree_leaf(&clearance->exmap->tree, range.page) ?:
		       exmap_reach(clearance->exmap, range.page);
		if (leaf)
			free_leaf(clearance, leaf, range.page, &result);
		else
			pages = exmap_rest_of_table(range.page, range.count);
	}
	clearance->pins = pins;
	cond_resched();
	return result;
}

/* A range, which is empty if it is not within the surface. */
static __always_inline struct exmap_result free_one(struct clearance *clearance,
						    struct page_range range)
{
	struct exmap_result result = {};
	u64 *leaf;

	if (likely(range.count == 1)) {
		leaf = pt_tree_leaf(&clearance->exmap->tree, range.page);
		if (unlikely(!leaf))
			leaf = exmap_reach(clearance->exmap, range.page);
		if (likely(leaf))
			free_leaf(clearance, leaf, range.page, &result);
	} else {
		result = free_run(clearance, range);
	}
	return result;
}

/* One page alone, flushed at once. False: it takes more than that, and nothing was done. */
static __always_inline bool free_alone(struct exmap *exmap, unsigned int index, u64 page,
				       struct exmap_result *result)
{
	struct frame_lane *lane = &exmap->pool.lanes[index];
	u64 *leaf = pt_tree_leaf(&exmap->tree, page);
	u64 frame;

	if (unlikely(!leaf))
		return false;
	frame = take_off(exmap, leaf, page, exmap_may_be_pinned(exmap));
	if (unlikely(frame == EXMAP_HELD))
		return false;
	if (unlikely(!frame))
		return true;
	exmap_flush_page(exmap, current->mm, page);
	WRITE_ONCE(*leaf, 0);
	lane->given++;
	frame_settle_one(&exmap->pool, lane, frame);
	exmap->interface[index].flushes++;
	result->pages = 1;
	return true;
}

static __always_inline void begin(struct clearance *clearance, struct exmap *exmap,
				  unsigned int index)
{
	*clearance = (struct clearance){
		.exmap = exmap,
		.lane = &exmap->pool.lanes[index],
		.interface = &exmap->interface[index],
		.leaving = exmap->interface[index].leaving,
		.pins = exmap_may_be_pinned(exmap),
	};
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

static noinline long free_vector(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	bool each = exmap->flags & VELLUM_EXMAP_FLUSH_EACH;
	u64 *entry = interface->vector, *end = entry + entries;
	struct clearance clearance;
	struct page_range range;
	long failed = 0;
	u64 before;

	begin(&clearance, exmap, index);
	before = clearance.lane->given;
	for (; entry < end; entry++) {
		range = exmap_decode(exmap, READ_ONCE(*entry));
		WRITE_ONCE(*entry, exmap_encode(interface, range, free_one(&clearance, range),
						&failed));
		if (unlikely(each))
			flush(&clearance);
	}
	flush(&clearance);
	trace_exmap_free(index, entries, clearance.lane->given - before);
	return failed;
}

/* Ranges of the interface's vector; returns how many entries have an error. */
long exmap_free_vector(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct exmap_result result = {};
	struct page_range range;
	long failed = 0;

	if (entries != 1)
		return free_vector(exmap, index, entries);
	range = exmap_decode(exmap, READ_ONCE(*interface->vector));
	if (range.count != 1 || unlikely(!free_alone(exmap, index, range.page, &result)))
		exmap_free(exmap, index, &range, &result, 1);
	WRITE_ONCE(*interface->vector, exmap_encode(interface, range, result, &failed));
	trace_exmap_free(index, entries, result.pages);
	return failed;
}
