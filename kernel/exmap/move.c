// SPDX-License-Identifier: GPL-2.0
/*
 * Frames go from page to page with their contents: taken off, TLBs flushed, put down. Who writes to
 * the old page until the flush writes to the frame, who writes later has a fault.
 */

#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "exmap/exmap.h"

/* Pages between two flushes. */
#define STRIDE	512

/*
 * Puts a frame down: on the new page, or back, or if both are taken into the pool. Something may
 * have begun to hold it since it was found to be nobody's: then it goes back.
 */
static bool put_down(struct exmap *exmap, struct frame_lane *lane, u64 from, u64 to, u64 frame)
{
	bool held = frame_is_held(pfn_to_page(frame));
	u64 *leaf = held ? NULL : pt_tree_make_leaf(&exmap->tree, to);
	bool over_zeros = false;
	bool moved = leaf && exmap_place(exmap, leaf, to, frame, &over_zeros);

	if (!moved)
		leaf = pt_tree_leaf(&exmap->tree, from);
	if (!moved && !(leaf && exmap_place(exmap, leaf, from, frame, &over_zeros))) {
		lane->given++;
		frame_pend(lane, frame);
		frame_settle(&exmap->pool, lane);
	}
	if (over_zeros)
		exmap_flush(exmap, current->mm, moved ? to : from, moved ? to : from);
	return moved;
}

static unsigned int move_some(struct exmap *exmap, struct frame_lane *lane, u64 from, u64 to,
			      unsigned int count, u64 *frames)
{
	bool pins = exmap_may_be_pinned(exmap);
	unsigned int i, taken = 0, moved = 0;

	for (i = 0; i < count; i++) {
		u64 *leaf, frame;

		frames[i] = 0;
		if (exmap_frame(exmap, to + i))
			continue;
		leaf = exmap_reach(exmap, from + i);
		if (!leaf)
			continue;
		/* Whoever has it pinned expects to see it at the old place. */
		frame = exmap_take_off(exmap, leaf, from + i, pins);
		frames[i] = frame == EXMAP_HELD ? 0 : frame;
		taken += frames[i] != 0;
	}
	if (taken)
		exmap_flush(exmap, current->mm, from, from + count - 1);
	for (i = 0; i < count; i++)
		if (frames[i])
			WRITE_ONCE(*pt_tree_leaf(&exmap->tree, from + i), 0);
	for (i = 0; i < count; i++)
		if (frames[i])
			moved += put_down(exmap, lane, from + i, to + i, frames[i]);
	return moved;
}

/*
 * Other commands have the interface between strides. Meanwhile the process may have unmapped the
 * surface, or may have been killed.
 */
static long lock_for_stride(struct exmap *exmap, struct exmap_interface *interface)
{
	long error = fatal_signal_pending(current) ? -EINTR : exmap_may_command(exmap);

	return error ?: exmap_lock_interface(exmap, interface, true);
}

static bool overlap(const struct vellum_exmap_move *move)
{
	return move->from < move->to + move->count && move->to < move->from + move->count;
}

long exmap_move(struct exmap *exmap, const struct vellum_exmap_move *move)
{
	struct exmap_interface *interface = exmap_find_interface(exmap, move->interface);
	u64 pages = exmap->tree.pages, done, moved = 0;
	long error = 0;
	u64 *frames;

	if (IS_ERR(interface))
		return PTR_ERR(interface);
	if (move->count > pages || move->from > pages - move->count ||
	    move->to > pages - move->count || overlap(move))
		return -EINVAL;
	frames = kmalloc_array(STRIDE, sizeof(*frames), GFP_KERNEL_ACCOUNT);
	if (!frames)
		return -ENOMEM;
	for (done = 0; done < move->count; done += STRIDE) {
		error = lock_for_stride(exmap, interface);
		if (error)
			break;
		moved += move_some(exmap, &exmap->pool.lanes[move->interface], move->from + done,
				   move->to + done, min_t(u64, STRIDE, move->count - done), frames);
		mutex_unlock(&interface->lock);
		cond_resched();
	}
	kfree(frames);
	return moved ?: error;
}
