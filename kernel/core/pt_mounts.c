// SPDX-License-Identifier: GPL-2.0
/* All mounts of what several processes share. See pt_mounts.h. */

#include <linux/mm.h>
#include <linux/sched/mm.h>

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

/* Where a process has the tree. */
struct place {
	struct mm_struct	*mm;
	unsigned long		start;
};

/* Finds the places of as many mounts as there is room for; the processes are kept. */
static u64 find_places(struct pt_mounts *mounts, struct place *places, u64 room)
{
	struct pt_mount *mount;
	struct mm_struct *mm;
	u64 count = 0;

	spin_lock(&mounts->lock);
	list_for_each_entry(mount, &mounts->list, node) {
		/* A process is there for as long as its mount is in the list. */
		mm = READ_ONCE(mount->mm);
		if (!mm || count++ >= room)
			continue;
		mmgrab(mm);
		places[count - 1] = (struct place){ mm, mount->start };
	}
	spin_unlock(&mounts->lock);
	return count;
}

bool pt_mounts_tell_secondary(struct pt_mounts *mounts, u64 page, u64 count)
{
	u64 room = READ_ONCE(mounts->count), found, i;
	struct place few[FEW], *places = few;
	bool are_told = true;

	if (room > FEW)
		places = kvmalloc_array(room, sizeof(*places), GFP_KERNEL_ACCOUNT);
	if (!places)
		return false;
	room = max_t(u64, room, FEW);
	found = find_places(mounts, places, room);
	for (i = 0; i < min(found, room); i++) {
		unsigned long start = places[i].start + (page << PAGE_SHIFT);

		are_told &= pt_secondary_invalidate(places[i].mm, start,
						    start + (count << PAGE_SHIFT));
		mmdrop(places[i].mm);
	}
	if (places != few)
		kvfree(places);
	return are_told && found <= room;
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
