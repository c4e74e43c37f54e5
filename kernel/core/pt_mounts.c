// SPDX-License-Identifier: GPL-2.0
/* All mounts of what several processes share. See pt_mounts.h. */

#include <linux/mm.h>

#include "core/pt_mount.h"
#include "core/pt_mounts.h"
#include "core/pt_secondary.h"

void pt_mounts_init(struct pt_mounts *mounts)
{
	spin_lock_init(&mounts->lock);
	INIT_LIST_HEAD(&mounts->list);
	mounts->count = 0;
}

void pt_mounts_add(struct pt_mounts *mounts, struct pt_mount *mount)
{
	spin_lock(&mounts->lock);
	list_add_tail(&mount->node, &mounts->list);
	mounts->count++;
	spin_unlock(&mounts->lock);
}

void pt_mounts_remove(struct pt_mounts *mounts, struct pt_mount *mount)
{
	spin_lock(&mounts->lock);
	list_del(&mount->node);
	mounts->count--;
	spin_unlock(&mounts->lock);
}

static void flush(struct pt_mounts *mounts, u64 page, u64 count, bool tables)
{
	struct pt_mount *mount;

	spin_lock(&mounts->lock);
	list_for_each_entry(mount, &mounts->list, node)
		pt_mount_flush(mount, page, count, tables);
	spin_unlock(&mounts->lock);
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
	struct pt_listener *next = listeners;
	struct pt_mount *mount;

	spin_lock(&mounts->lock);
	list_for_each_entry(mount, &mounts->list, node) {
		if (next == listeners + room)
			break;
		spin_lock(&mount->lock);
		next += pt_listener_find(mount, next);
		spin_unlock(&mount->lock);
	}
	*found = next - listeners;
	spin_unlock(&mounts->lock);
	return list_entry_is_head(mount, &mounts->list, node);
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
	for (i = 0; i < found; i++)
		are_told &= pt_listener_tell(listeners + i, page, count);
	if (listeners != few)
		kvfree(listeners);
	return are_told;
}

void pt_mounts_detach(struct pt_mounts *mounts)
{
	struct pt_mount *mount;

	spin_lock(&mounts->lock);
	list_for_each_entry(mount, &mounts->list, node)
		pt_mount_detach(mount);
	spin_unlock(&mounts->lock);
}

u64 pt_mounts_wrong(struct pt_mounts *mounts)
{
	struct pt_mount *mount;
	u64 wrong = 0;

	spin_lock(&mounts->lock);
	list_for_each_entry(mount, &mounts->list, node)
		wrong += pt_mount_wrong(mount);
	spin_unlock(&mounts->lock);
	return wrong;
}
