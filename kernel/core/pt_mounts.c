// SPDX-License-Identifier: GPL-2.0
/* All mounts of what several processes share. See pt_mounts.h. */

#include "core/pt_mount.h"
#include "core/pt_mounts.h"

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
