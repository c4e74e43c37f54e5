// SPDX-License-Identifier: GPL-2.0
/* All mounts of a tree that several processes share. pt_mounts.h describes them. */

#include <linux/mm.h>

#include "core/pt_flush.h"
#include "core/pt_mount.h"
#include "core/pt_mounts.h"
#include "core/pt_secondary.h"

void pt_mounts_init(struct pt_mounts *mounts)
{
	mutex_init(&mounts->lock);
	mounts->tree = RB_ROOT;
	mounts->count = 0;
}

static struct pt_mount *pt_mounts_entry(struct rb_node *node)
{
	return node ? rb_entry(node, struct pt_mount, node) : NULL;
}

static struct pt_mount *pt_mounts_first(struct pt_mounts *mounts)
{
	lockdep_assert_held(&mounts->lock);
	return pt_mounts_entry(rb_first(&mounts->tree));
}

/* The next mount. There may be as many mounts as the system has mappings. */
static struct pt_mount *pt_mounts_next(struct pt_mount *mount)
{
	cond_resched();
	return pt_mounts_entry(rb_next(&mount->node));
}

static bool pt_mounts_less(struct rb_node *node, const struct rb_node *other)
{
	return pt_mounts_entry(node)->process < rb_entry(other, struct pt_mount, node)->process;
}

void pt_mounts_add(struct pt_mounts *mounts, struct pt_mount *mount, struct mm_struct *process)
{
	mount->process = process;
	mutex_lock(&mounts->lock);
	rb_add(&mount->node, &mounts->tree, pt_mounts_less);
	mounts->count++;
	mutex_unlock(&mounts->lock);
}

void pt_mounts_remove(struct pt_mounts *mounts, struct pt_mount *mount)
{
	mutex_lock(&mounts->lock);
	rb_erase(&mount->node, &mounts->tree);
	mounts->count--;
	mutex_unlock(&mounts->lock);
}

/*
 * Flushes a process once for all of its mounts, after the last of them. Its page tables exist
 * meanwhile, as a mount is removed before its mapping ends.
 */
static void pt_mounts_flush_process(struct pt_mount *mount, struct pt_mount *next,
				    struct pt_area *area, bool tables)
{
	if (next && next->process == mount->process)
		return;
	if (area->end && tables)
		pt_flush_tables(mount->process, area->start, area->end);
	else if (area->end)
		pt_flush_range(mount->process, area->start, area->end);
	*area = (struct pt_area){};
}

static void __pt_mounts_flush(struct pt_mounts *mounts, u64 page, u64 count, bool tables)
{
	struct pt_mount *mount, *other;
	struct pt_area area = {};

	mutex_lock(&mounts->lock);
	for (mount = pt_mounts_first(mounts); mount; mount = other) {
		pt_mount_find(mount, page, count, &area);
		other = pt_mounts_next(mount);
		pt_mounts_flush_process(mount, other, &area, tables);
	}
	mutex_unlock(&mounts->lock);
}

void pt_mounts_flush(struct pt_mounts *mounts, u64 page, u64 count)
{
	__pt_mounts_flush(mounts, page, count, false);
}

void pt_mounts_flush_tables(struct pt_mounts *mounts, u64 page, u64 count)
{
	__pt_mounts_flush(mounts, page, count, true);
}

/* So many listeners fit on the stack. */
#define PT_MOUNTS_FEW	8

/* Finds as many listeners as there is room for. False: there are more. */
static bool pt_mounts_find_listeners(struct pt_mounts *mounts, struct pt_listener *listeners,
				     u64 room, u64 *found)
{
	struct pt_listener *listener = listeners;
	struct pt_mount *mount;

	mutex_lock(&mounts->lock);
	for (mount = pt_mounts_first(mounts); mount; mount = pt_mounts_next(mount)) {
		if (listener == listeners + room)
			break;
		spin_lock(&mount->lock);
		listener += pt_listener_find(mount, listener);
		spin_unlock(&mount->lock);
	}
	*found = listener - listeners;
	mutex_unlock(&mounts->lock);
	return !mount;
}

bool pt_mounts_tell_secondary(struct pt_mounts *mounts, u64 page, u64 count)
{
	struct pt_listener few[PT_MOUNTS_FEW], *listeners = few;
	u64 room = READ_ONCE(mounts->count), found, i;
	bool are_told;

	if (room > PT_MOUNTS_FEW)
		listeners = kvmalloc_array(room, sizeof(*listeners), GFP_KERNEL_ACCOUNT);
	if (!listeners)
		return false;
	are_told = pt_mounts_find_listeners(mounts, listeners, max_t(u64, room, PT_MOUNTS_FEW),
					    &found);
	for (i = 0; i < found; i++) {
		are_told &= pt_listener_tell(listeners + i, page, count);
		cond_resched();
	}
	if (listeners != few)
		kvfree(listeners);
	return are_told;
}

void pt_mounts_detach(struct pt_mounts *mounts)
{
	struct pt_mount *mount, *other;
	struct pt_area area = {};

	mutex_lock(&mounts->lock);
	for (mount = pt_mounts_first(mounts); mount; mount = other) {
		pt_mount_take_out(mount, &area);
		other = pt_mounts_next(mount);
		pt_mounts_flush_process(mount, other, &area, true);
	}
	mutex_unlock(&mounts->lock);
}

void pt_mounts_unbar(struct pt_mounts *mounts)
{
	struct pt_mount *mount;

	mutex_lock(&mounts->lock);
	for (mount = pt_mounts_first(mounts); mount; mount = pt_mounts_next(mount)) {
		spin_lock(&mount->lock);
		mount->barred = false;
		spin_unlock(&mount->lock);
	}
	mutex_unlock(&mounts->lock);
}

u64 pt_mounts_barred(struct pt_mounts *mounts)
{
	struct pt_mount *mount;
	u64 barred = 0;

	mutex_lock(&mounts->lock);
	for (mount = pt_mounts_first(mounts); mount; mount = pt_mounts_next(mount))
		barred += READ_ONCE(mount->barred);
	mutex_unlock(&mounts->lock);
	return barred;
}

u64 pt_mounts_wrong(struct pt_mounts *mounts)
{
	struct pt_mount *mount;
	u64 wrong = 0;

	mutex_lock(&mounts->lock);
	for (mount = pt_mounts_first(mounts); mount; mount = pt_mounts_next(mount))
		wrong += pt_mount_wrong(mount);
	mutex_unlock(&mounts->lock);
	return wrong;
}
