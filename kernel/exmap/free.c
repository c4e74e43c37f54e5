// SPDX-License-Identifier: GPL-2.0
/*
 * Frames leave the surface: entries are cleared, TLBs are flushed once, and then the frames are
 * free. A page that something has pinned stays.
 */

#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/sched.h>

#include "exmap/exmap.h"
#include "trace.h"

/* The longest wait of a command for holders of pages, in nanoseconds. */
#define EXMAP_FREE_PATIENCE	NSEC_PER_MSEC

/* The state of a thread that frees: pages taken off and not yet flushed. */
struct exmap_clearance {
	struct exmap		*exmap;
	struct frame_lane	*lane;
	struct exmap_interface	*interface;
	pteval_t		**leaving;	/* the interface's; `pages` are in use */
	unsigned int		pages;
	unsigned int		extents;	/* of 2 MiB; their pages are not in `pages` */
	u64			first, last;	/* while there are few pages */
	bool			pins;		/* pages may be pinned */
	u64			deadline;	/* when the wait for holders ends, or 0 */
	bool			is_impatient;	/* the wait is over */
};

/* Flushes after extents of 2 MiB were taken off, and opens their tables. */
static noinline void exmap_free_flush_extents(struct exmap_clearance *clearance)
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

static noinline void exmap_free_give_extents(struct exmap_clearance *clearance)
{
	const struct exmap_extent *extent = clearance->interface->extents;

	clearance->lane->given += (u64)clearance->extents * FRAME_BLOCK;
	clearance->lane->block_given += (u64)clearance->extents * FRAME_BLOCK;
	for (; clearance->extents; clearance->extents--, extent++)
		frame_block_give(&clearance->exmap->pool, extent->frame);
}

static void exmap_free_flush(struct exmap_clearance *clearance)
{
	pteval_t **leaf = clearance->leaving, **end = leaf + clearance->pages;
	struct exmap *exmap = clearance->exmap;

	if (!(clearance->pages | clearance->extents))
		return;
	if (unlikely(clearance->extents))
		exmap_free_flush_extents(clearance);
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
		exmap_free_give_extents(clearance);
}

/*
 * Returns what CPUs have noted of a page, accessed or dirty, after its entry left the tree with the
 * value `last`. They note nothing more. If the surface was detached meanwhile, notes at its end may
 * have got lost on their way to the tree: such a page counts as accessed and written.
 */
static pteval_t exmap_free_notes(struct exmap *exmap, u64 page, pteval_t last, u64 detaches)
{
	last |= pt_mount_bits(&exmap->mount, page, ~(pteval_t)0);
	if (page >= exmap->mount.tail && READ_ONCE(exmap->mount.detaches) != detaches)
		last |= PT_MOUNT_NOTED;
	return last & PT_MOUNT_NOTED;
}

/*
 * Takes a page's frame off and returns its number; 0 if there is none; EXMAP_HELD if something
 * holds it, and such a page stays. The entry is leaving until the caller has flushed and made it
 * none.
 *
 * Takes the lock of the table, unlike the code that puts frames on. A thread whose access failed
 * before the frame came finds the frame in the core's fault handler. The handler writes the entry
 * back as it has read it, under this lock, and without reading it once more: a frame that was taken
 * off meanwhile would be mapped again. And code that takes a reference through an entry holds this
 * lock, so no reference is taken later.
 *
 * `noted`, unless it is NULL, gets what CPUs have noted of the page.
 */
static __always_inline u64 __exmap_take_off(struct exmap *exmap, pteval_t *leaf, u64 page,
					    bool pins, pteval_t *noted)
{
	u64 detaches = noted ? READ_ONCE(exmap->mount.detaches) : 0;
	pteval_t old = READ_ONCE(*leaf), last = 0;
	spinlock_t *lock;

	if (unlikely(!exmap_has_frame(exmap, old))) {
		/*
		 * A claimed entry is leaving, or coming, with all of its 2 MiB. A splitting one has
		 * a frame.
		 */
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
		last = xchg(leaf, EXMAP_LEAVING);
	else
		old = 0;
	spin_unlock(lock);
	if (noted && old)
		*noted = exmap_free_notes(exmap, page, last, detaches);
	exmap_leaf_changed(exmap, page);
	return pt_leaf_pfn(old);
}

static noinline u64 exmap_take_off(struct exmap *exmap, pteval_t *leaf, u64 page, bool pins)
{
	return __exmap_take_off(exmap, leaf, page, pins, NULL);
}

u64 exmap_take_off_noted(struct exmap *exmap, pteval_t *leaf, u64 page, bool pins, pteval_t *noted)
{
	return __exmap_take_off(exmap, leaf, page, pins, noted);
}

static __always_inline void exmap_free_note(struct exmap_clearance *clearance, u64 page)
{
	if (likely(clearance->pages++ >= EXMAP_FLUSH_PAGES))
		return;
	if (clearance->pages == 1) {
		clearance->last = page;
		clearance->first = page;
	}
	clearance->first = min(clearance->first, page);
	clearance->last = max(clearance->last, page);
}

/* Whether something holds a page of the range. */
static bool exmap_free_is_held(struct exmap *exmap, struct exmap_range range)
{
	unsigned int pages;
	u64 frame;

	for (; range.count && exmap_may_go_on(range.page);
	     range.page += pages, range.count -= pages) {
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
 * Whether something still holds a page of the range after a wait. The end of direct I/O wakes its
 * waiter a little before it releases the pages. So the command waits a moment, once for all its
 * entries.
 */
static noinline bool exmap_free_stays_held(struct exmap_clearance *clearance,
					   struct exmap_range range)
{
	if (clearance->is_impatient)
		return true;
	/* Other threads wait for pages that are leaving. */
	exmap_free_flush(clearance);
	if (!clearance->deadline)
		clearance->deadline = ktime_get_ns() + EXMAP_FREE_PATIENCE;
	while (exmap_free_is_held(clearance->exmap, range)) {
		if (ktime_get_ns() >= clearance->deadline || fatal_signal_pending(current)) {
			clearance->is_impatient = true;
			return true;
		}
		usleep_range(10, 50);
	}
	return false;
}

static __always_inline void exmap_free_leaf(struct exmap_clearance *clearance, pteval_t *leaf,
					    u64 page, struct exmap_result *result)
{
	u64 frame = __exmap_take_off(clearance->exmap, leaf, page, clearance->pins, NULL);

	if (unlikely(frame == EXMAP_HELD) &&
	    !exmap_free_stays_held(clearance, (struct exmap_range){ page, 1 }))
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
	exmap_free_note(clearance, page);
	if (frame_pend(clearance->lane, frame))
		exmap_free_flush(clearance);
}

/* Takes an extent of 2 MiB off, if one entry maps it. */
static bool exmap_free_extent(struct exmap_clearance *clearance, u64 page)
{
	u64 frame = pt_huge_take_off(&clearance->exmap->mount, page);

	if (!frame)
		return false;
	clearance->interface->extents[clearance->extents++] = (struct exmap_extent){ page, frame };
	if (clearance->extents == EXMAP_EXTENTS)
		exmap_free_flush(clearance);
	return true;
}

/*
 * Frees all of a range, or nothing of it: to its owner the range may be a single page. A page that
 * something begins to hold after the check is freed, too, and its frame is set aside.
 */
static noinline struct exmap_result exmap_free_run(struct exmap_clearance *clearance,
						   struct exmap_range range)
{
	struct exmap_result result = {};
	bool pins = clearance->pins;
	unsigned int pages;
	pteval_t *leaf = NULL;

	if (pins && exmap_free_is_held(clearance->exmap, range) &&
	    exmap_free_stays_held(clearance, range)) {
		clearance->interface->busy++;
		result.error = -EBUSY;
		return result;
	}
	clearance->pins = false;
	for (; range.count && exmap_may_go_on(range.page);
	     range.page += pages, range.count -= pages) {
		if (exmap_is_extent(clearance->exmap, range) &&
		    exmap_free_extent(clearance, range.page)) {
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
			exmap_free_leaf(clearance, leaf, range.page, &result);
		else
			pages = exmap_rest_of_table(range.page, range.count);
	}
	clearance->pins = pins;
	cond_resched();
	return result;
}

/* Frees a range. A range that is not within the surface is empty. */
static __always_inline struct exmap_result exmap_free_one(struct exmap_clearance *clearance,
							  struct exmap_range range)
{
	struct exmap_result result = {};
	pteval_t *leaf;

	if (likely(range.count == 1)) {
		leaf = pt_tree_leaf(&clearance->exmap->tree, range.page);
		if (unlikely(!leaf))
			leaf = exmap_reach(clearance->exmap, range.page);
		if (likely(leaf))
			exmap_free_leaf(clearance, leaf, range.page, &result);
	} else {
		result = exmap_free_run(clearance, range);
	}
	return result;
}

/* Frees a single page, and flushes at once. False: that is not enough, and nothing was done. */
static __always_inline bool exmap_free_alone(struct exmap *exmap, unsigned int index, u64 page,
					     struct exmap_result *result)
{
	struct frame_lane *lane = &exmap->pool.lanes[index];
	pteval_t *leaf = pt_tree_leaf(&exmap->tree, page);
	u64 frame;

	if (unlikely(!leaf))
		return false;
	frame = __exmap_take_off(exmap, leaf, page, exmap_may_be_pinned(exmap), NULL);
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

static __always_inline void exmap_free_begin(struct exmap_clearance *clearance, struct exmap *exmap,
					     unsigned int index)
{
	*clearance = (struct exmap_clearance){
		.exmap = exmap,
		.lane = &exmap->pool.lanes[index],
		.interface = &exmap->interface[index],
		.leaving = exmap->interface[index].leaving,
		.pins = exmap_may_be_pinned(exmap),
	};
}

void exmap_free(struct exmap *exmap, unsigned int index, const struct exmap_range *ranges,
		struct exmap_result *results, unsigned int count)
{
	struct exmap_clearance clearance;
	unsigned int i;

	exmap_free_begin(&clearance, exmap, index);
	for (i = 0; i < count; i++)
		results[i] = exmap_free_one(&clearance, ranges[i]);
	exmap_free_flush(&clearance);
}

static noinline long __exmap_free_vector(struct exmap *exmap, unsigned int index,
					 unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	bool each = exmap->flags & VELLUM_EXMAP_FLUSH_EACH;
	u64 *entry = interface->vector, *end = entry + entries;
	struct exmap_clearance clearance;
	struct exmap_range range;
	long failed = 0;
	u64 before;

	exmap_free_begin(&clearance, exmap, index);
	before = clearance.lane->given;
	for (; entry < end; entry++) {
		range = exmap_decode(exmap, READ_ONCE(*entry));
		WRITE_ONCE(*entry, exmap_encode(interface, range, exmap_free_one(&clearance, range),
						&failed));
		if (unlikely(each))
			exmap_free_flush(&clearance);
	}
	exmap_free_flush(&clearance);
	trace_exmap_free(index, entries, clearance.lane->given - before);
	return failed;
}

/* Frees the ranges of the interface's vector. Returns the number of entries with an error. */
long exmap_free_vector(struct exmap *exmap, unsigned int index, unsigned int entries)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct exmap_result result = {};
	struct exmap_range range;
	long failed = 0;

	if (entries != 1)
		return __exmap_free_vector(exmap, index, entries);
	range = exmap_decode(exmap, READ_ONCE(*interface->vector));
	if (range.count != 1 || unlikely(!exmap_free_alone(exmap, index, range.page, &result)))
		exmap_free(exmap, index, &range, &result, 1);
	WRITE_ONCE(*interface->vector, exmap_encode(interface, range, result, &failed));
	trace_exmap_free(index, entries, result.pages);
	return failed;
}
