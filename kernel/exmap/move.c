// SPDX-License-Identifier: GPL-2.0
/*
 * Frames go from page to page with their contents, and with what CPUs have noted of them: taken
 * off, TLBs flushed, put down. A thread that writes to the old page before the flush writes to the
 * frame. A thread that writes later faults.
 */

#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "exmap/exmap.h"

/* The number of pages between two flushes. */
#define EXMAP_MOVE_STRIDE	512

/* A frame on its way, or 0, and what CPUs have noted of its page, for HARVEST. */
struct exmap_moving {
	u64		frame;
	pteval_t	noted;
};

/*
 * Puts a frame down on the new page, or back on the old one, or into the pool if both pages have a
 * frame by now. If something has begun to hold the frame since it was taken off, it goes back.
 */
static bool exmap_move_put_down(struct exmap *exmap, struct frame_lane *lane, u64 from, u64 to,
				struct exmap_moving moving, unsigned int *zeros)
{
	bool held = frame_is_held(pfn_to_page(moving.frame));
	pteval_t *leaf = held ? NULL : pt_tree_make_leaf(&exmap->tree, to);
	bool moved = leaf && exmap_place_noted(exmap, leaf, to, moving.frame, moving.noted, zeros);

	if (!moved) {
		exmap_found(exmap, zeros);
		leaf = pt_tree_leaf(&exmap->tree, from);
	}
	if (!moved && !(leaf && exmap_place_noted(exmap, leaf, from, moving.frame, moving.noted,
						  zeros))) {
		lane->given++;
		frame_pend(lane, moving.frame);
		frame_settle(&exmap->pool, lane);
	}
	return moved;
}

static unsigned int exmap_move_some(struct exmap *exmap, unsigned int index, u64 from, u64 to,
				    unsigned int count, struct exmap_moving *moving)
{
	struct frame_lane *lane = &exmap->pool.lanes[index];
	bool pins = exmap_may_be_pinned(exmap);
	unsigned int i, taken = 0, moved = 0, zeros = 0;

	for (i = 0; i < count; i++) {
		pteval_t *leaf;
		u64 frame;

		moving[i].frame = 0;
		if (exmap_frame(exmap, to + i)) {
			exmap_found(exmap, &zeros);
			continue;
		}
		leaf = exmap_reach(exmap, from + i);
		if (!leaf)
			continue;
		/* A holder expects to see the frame at the old place. */
		frame = exmap_take_off_noted(exmap, leaf, from + i, pins, &moving[i].noted);
		moving[i].frame = frame == EXMAP_HELD ? 0 : frame;
		taken += moving[i].frame != 0;
	}
	if (taken)
		exmap_flush(exmap, current->mm, from, from + count - 1);
	for (i = 0; i < count; i++)
		if (moving[i].frame)
			WRITE_ONCE(*pt_tree_leaf(&exmap->tree, from + i), 0);
	for (i = 0; i < count; i++)
		if (moving[i].frame)
			moved += exmap_move_put_down(exmap, lane, from + i, to + i, moving[i],
						     &zeros);
	if (unlikely(zeros))
		exmap_flush_zeros(exmap, &exmap->interface[index], current->mm, zeros);
	return moved;
}

/*
 * Locks the interface for a stride. Other commands run between strides. Meanwhile the process may
 * have unmapped the surface, or may have been killed.
 */
static long exmap_move_lock(struct exmap *exmap, struct exmap_interface *interface)
{
	long error = fatal_signal_pending(current) ? -EINTR : exmap_may_command(exmap);

	return error ?: exmap_lock_interface(exmap, interface, true);
}

static bool exmap_move_overlaps(const struct vellum_exmap_move *move)
{
	return move->from < move->to + move->count && move->to < move->from + move->count;
}

long exmap_move(struct exmap *exmap, const struct vellum_exmap_move *move)
{
	struct exmap_interface *interface = exmap_find_interface(exmap, move->interface);
	u64 pages = exmap->tree.pages, done, moved = 0;
	struct exmap_moving *moving;
	long error = 0;

	if (IS_ERR(interface))
		return PTR_ERR(interface);
	if (move->count > pages || move->from > pages - move->count ||
	    move->to > pages - move->count || exmap_move_overlaps(move))
		return -EINVAL;
	moving = kmalloc_array(EXMAP_MOVE_STRIDE, sizeof(*moving), GFP_KERNEL_ACCOUNT);
	if (!moving)
		return -ENOMEM;
	for (done = 0; done < move->count; done += EXMAP_MOVE_STRIDE) {
		error = exmap_move_lock(exmap, interface);
		if (error)
			break;
		moved += exmap_move_some(exmap, move->interface, move->from + done, move->to + done,
					 min_t(u64, EXMAP_MOVE_STRIDE, move->count - done), moving);
		mutex_unlock(&interface->lock);
		cond_resched();
	}
	kfree(moving);
	return moved ?: error;
}
