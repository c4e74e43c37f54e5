// SPDX-License-Identifier: GPL-2.0
/* All mounts of what several processes share. See pt_mounts.h. */

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

static struct pt_mount *mount_of(struct rb_node *node)
{
	return node ? rb_entry(node, struct pt_mount, node) : NULL;
}

static struct pt_mount *first(struct pt_mounts *mounts)
{
	lockdep_assert_held(&mounts->lock);
	return mount_of(rb_first(&mounts->tree));
}

/* There may be as many as the system has mappings. */
static struct pt_mount *next(struct pt_mount *mount)
{
	cond_resched();
	return mount_of(rb_next(&mount->node));
}

static bool is_less(struct rb_node *node, const struct rb_node *other)
{
	return mount_of(node)->process < rb_entry(other, struct pt_mount, node)->process;
}

void pt_mounts_add(struct pt_mounts *mounts, struct pt_mount *mount, struct mm_struct *process)
{
	mount->process = process;
	mutex_lock(&mounts->lock);
	rb_add(&mount->node, &mounts->tree, is_less);
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
 * After the last mount of a process: one flush, for all of its mounts. It has page tables meanwhile,
 * as the mapping of a mount does not end before the mount is removed.
 */
static void flush_process(struct pt_mount *mount, struct pt_mount *next, struct pt_area *area,
			  bool tables)
{
	if (next && next->process == mount->process)
		return;
	if (area->end && tables)
		pt_flush_tables(mount->process, area->start, area->end);
	else if (area->end)
		pt_flush_range(mount->process, area->start, area->end);
	*area = (struct pt_area){};
}

static void flush(struct pt_mounts *mounts, u64 page, u64 count, bool tables)
{
	struct pt_mount *mount, *other;
	struct pt_area area = {};

	mutex_lock(&mounts->lock);
	for (mount = first(mounts); mount; mount = other) {
		pt_mount_find(mount, page, count, &area);
		other = next(mount);
		flush_process(mount, other, &area, tables);
	}
	mutex_unlock(&mounts->lock);
}

void pt_mounts_flush(struct pt_mounts *mounts, u64 page, u64 count)
{
	flush(mounts, page, count, false);
}

void pt_mounts_flush_tables(struct pt_mounts *mounts, u64 page, u64 count)
{
	flush(mounts, page, count, true);
}

/* So many mounts need no memory to be remembered. */
#define FEW	8

/* Finds as many as there is room for. False: there are more. */
static bool find_listeners(struct pt_mounts *mounts, struct pt_listener *listeners, u64 room,
			   u64 *found)
{
	struct pt_listener *listener = listeners;
	struct pt_mount *mount;

	mutex_lock(&mounts->lock);
	for (mount = first(mounts); mount; mount = next(mount)) {
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
	struct pt_listener few[FEW], *listeners = few;
	u64 room = READ_ONCE(mounts->count), found, i;
	bool are_told;

	if (room > FEW)
		listeners = kvmalloc_array(room, sizeof(*listeners), GFP_KERNEL_ACCOUNT);
	if (!listeners)
		return false;
	are_told = find_listeners(mounts, listeners, max_t(u64, room, FEW), &found);
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
	for (mount = first(mounts); mount; mount = other) {
		pt_mount_take_out(mount, &area);
		other = next(mount);
		flush_process(mount, other, &area, true);
	}
	mutex_unlock(&mounts->lock);
}

u64 pt_mounts_wrong(struct pt_mounts *mounts)
{
	struct pt_mount *mount;
	u64 wrong = 0;

	mutex_lock(&mounts->lock);
	for (mount = first(mounts); mount; mount = next(mount))
		wrong += pt_mount_wrong(mount);
	mutex_unlock(&mounts->lock);
	return wrong;
}
