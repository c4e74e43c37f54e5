// SPDX-License-Identifier: GPL-2.0
/*
 * Frees page tables of a surface that have become empty. A table takes 4 KiB for 2 MiB of
 * addresses. A program whose pages wander over a large surface would collect one for each 2 MiB
 * that it ever touched.
 *
 * Between two prunes the tree may gain as many tables as the pool has frames. So the number of
 * tables stays within twice what the resident pages can need, and the work for each table is
 * bounded. The tree may gain fewer where the user's limit of locked memory is near.
 *
 * During a prune no other thread walks the tree: all interfaces are locked, faults and debuggers
 * wait for the mmap lock, and the mount is detached. A transfer that ends meanwhile finds claimed
 * entries, and is concluded after the prune (transfer.c).
 */

#include <linux/mm.h>

#include "exmap/exmap.h"

/*
 * The tables that a vector of single pages may need. The tree grows into this room without a prune.
 */
#define EXMAP_PRUNE_RESERVE		VELLUM_EXMAP_VECTOR_ENTRIES
/* With room for no more tables than this, every command looks for empty ones first. */
#define EXMAP_PRUNE_LEAST		32

/* The number of frames taken off, which may have made tables empty. */
static u64 exmap_frames_given(const struct exmap *exmap)
{
	u64 given = 0;
	unsigned int i;

	for (i = 0; i < exmap->pool.count; i++)
		given += READ_ONCE(exmap->pool.lanes[i].given);
	return given;
}

static long exmap_table_count(const struct exmap *exmap)
{
	return atomic_long_read(&exmap->tree.tables);
}

/* The number of tables that the tree may grow by before the next prune. */
static long exmap_prune_growth(struct exmap *exmap)
{
	u64 wanted = READ_ONCE(exmap->pool.frames) + (u64)exmap->pool.block_count * FRAME_BLOCK +
		     EXMAP_PRUNE_RESERVE;
	u64 room = exmap_chargeable(exmap);

	if (room <= EXMAP_PRUNE_LEAST)
		return -1;
	room = room > EXMAP_PRUNE_RESERVE + EXMAP_PRUNE_LEAST ? room - EXMAP_PRUNE_RESERVE :
								EXMAP_PRUNE_LEAST;
	return min_t(u64, wanted, room);
}

void exmap_set_prune_mark(struct exmap *exmap)
{
	long tables = exmap_table_count(exmap);

	exmap->pruned_tables = tables;
	exmap->pruned_given = exmap_frames_given(exmap);
	/* The tables that the process sees must stay. */
	WRITE_ONCE(exmap->prune_at,
		   exmap->shows_tables ? LONG_MAX : tables + exmap_prune_growth(exmap));
}

/* Whether tables have come, or frames have gone, since the last prune. */
static bool exmap_prune_is_worthwhile(const struct exmap *exmap)
{
	return exmap_table_count(exmap) > READ_ONCE(exmap->prune_at) &&
	       (exmap_table_count(exmap) != READ_ONCE(exmap->pruned_tables) ||
		exmap_frames_given(exmap) != READ_ONCE(exmap->pruned_given));
}

static int exmap_prune_locked(struct exmap *exmap, struct mm_struct *mm)
{
	struct vm_area_struct *vma;
	LIST_HEAD(empty);

	if (mmap_write_lock_killable(mm))
		return -EINTR;
	vma = find_vma(mm, exmap->mount.start);
	/* The process may have unmapped it meanwhile. */
	if (exmap->mount.mm == mm && vma && vma->vm_private_data == &exmap->mount &&
	    !exmap->shows_tables) {
		pt_vma_start_write(vma);
		pt_mount_detach(&exmap->mount);
		pt_tree_unlink_empty(&exmap->tree, exmap->zero_leaf, &empty);
		/* A virtual machine may have cached zeros of it, a device its tables. */
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

	if (!exmap_prune_is_worthwhile(exmap))
		return 0;
	if (!may_wait)
		return -EAGAIN;
	if (mutex_lock_killable(&exmap->sizing))
		return -EINTR;
	/* Another thread may have just pruned. */
	if (exmap_prune_is_worthwhile(exmap)) {
		for (i = 0; i < exmap->interfaces; i++)
			mutex_lock_nest_lock(&exmap->interface[i].lock, &exmap->sizing);
		down_write(&exmap->walking);
		error = exmap_prune_locked(exmap, current->mm);
		exmap_set_prune_mark(exmap);
		up_write(&exmap->walking);
		while (i--)
			mutex_unlock(&exmap->interface[i].lock);
	}
	mutex_unlock(&exmap->sizing);
	return error;
}
