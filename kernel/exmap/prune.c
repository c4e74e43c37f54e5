// SPDX-License-Identifier: GPL-2.0
/*
 * Page tables of a surface go that have become empty. A table is 4 KiB for 2 MiB of addresses; a
 * program whose pages wander over a large surface would collect one for each 2 MiB that it ever
 * touched.
 *
 * Between two prunes the tree may gain as many tables as the pool has frames, so that the tables
 * that are there stay within twice what the resident pages can need, and the work for a table is
 * bounded; or fewer, where the user's limit of locked memory is near.
 *
 * While tables go, no other thread walks the tree: all interfaces are locked, faults and debuggers
 * wait for the mmap lock, the mount is detached. A transfer that ends meanwhile finds claimed
 * entries, and is concluded after that (transfer.c).
 */

#include <linux/mm.h>

#include "exmap/exmap.h"

/* Tables that a vector of single pages may need: while there is room for so many more, use it. */
#define RESERVE		VELLUM_EXMAP_VECTOR_ENTRIES
/* With room for no more than so many, every command looks for empty ones first. */
#define LEAST		32

/* Frames that were taken off: what may have made tables empty. */
static u64 frames_given(const struct exmap *exmap)
{
	u64 given = 0;
	unsigned int i;

	for (i = 0; i < exmap->pool.count; i++)
		given += READ_ONCE(exmap->pool.lanes[i].given);
	return given;
}

static long tables_of(const struct exmap *exmap)
{
	return atomic_long_read(&exmap->tree.tables);
}

/* By how many tables the tree may grow before the next prune. */
static long growth(struct exmap *exmap)
{
	u64 wanted = READ_ONCE(exmap->pool.frames) + (u64)exmap->pool.block_count * FRAME_BLOCK +
		     RESERVE;
	u64 room = exmap_chargeable(exmap);

	if (room <= LEAST)
		return -1;
	return min_t(u64, wanted, room > RESERVE + LEAST ? room - RESERVE : LEAST);
}

void exmap_set_prune_mark(struct exmap *exmap)
{
	long tables = tables_of(exmap);

	exmap->pruned_tables = tables;
	exmap->pruned_given = frames_given(exmap);
	/* What the process sees of the tables must stay. */
	WRITE_ONCE(exmap->prune_at, exmap->shows_tables ? LONG_MAX : tables + growth(exmap));
}

/* Tables have come, or frames have gone, since the last prune. */
static bool is_worthwhile(const struct exmap *exmap)
{
	return tables_of(exmap) > READ_ONCE(exmap->prune_at) &&
	       (tables_of(exmap) != READ_ONCE(exmap->pruned_tables) ||
		frames_given(exmap) != READ_ONCE(exmap->pruned_given));
}

static int prune_locked(struct exmap *exmap, struct mm_struct *mm)
{
	struct vm_area_struct *vma;
	LIST_HEAD(empty);

	if (mmap_write_lock_killable(mm))
		return -EINTR;
	vma = find_vma(mm, exmap->mount.start);
	/* Unless the process has unmapped it meanwhile. */
	if (exmap->mount.mm == mm && vma && vma->vm_private_data == &exmap->mount &&
	    !exmap->shows_tables) {
		pt_vma_start_write(vma);
		pt_mount_detach(&exmap->mount);
		pt_tree_unlink_empty(&exmap->tree, exmap->zero_leaf, &empty);
		/* A virtual machine may have zeros from it, a device its tables. */
		pt_mount_tell(&exmap->mount, mm, 0, exmap->tree.pages);
		pt_tree_free_unlinked(&exmap->tree, &empty);
	}
	mmap_write_unlock(mm);
	return 0;
}

int exmap_prune(struct exmap *exmap, bool may_wait)
{
	unsigned int i;
	int error = 0;

	if (!is_worthwhile(exmap))
		return 0;
	if (!may_wait)
		return -EAGAIN;
	if (mutex_lock_killable(&exmap->sizing))
		return -EINTR;
	/* Unless another thread has just done it. */
	if (is_worthwhile(exmap)) {
		for (i = 0; i < exmap->interfaces; i++)
			mutex_lock_nest_lock(&exmap->interface[i].lock, &exmap->sizing);
		down_write(&exmap->walking);
		error = prune_locked(exmap, current->mm);
		exmap_set_prune_mark(exmap);
		up_write(&exmap->walking);
		while (i--)
			mutex_unlock(&exmap->interface[i].lock);
	}
	mutex_unlock(&exmap->sizing);
	return error;
}
