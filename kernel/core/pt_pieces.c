// SPDX-License-Identifier: GPL-2.0
/* The entries by which a tree goes into a process, and the place where it goes. */

#include <linux/mm.h>
#include <linux/mman.h>
#include <linux/slab.h>

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_pieces.h"
#include "core/pt_slot.h"

/*
 * Finds the entries by which a table goes into the process: one for the table itself, if the
 * mapping covers all of it, or else those for the tables below it. Counts them if there is no array
 * for them yet.
 */
static int pt_pieces_divide(struct pt_mount *mount, pteval_t *table, pteval_t *entry,
			    unsigned int level, u64 page)
{
	unsigned long addr = mount->start + (page << PAGE_SHIFT);
	unsigned long size = pt_slot_size(level);
	unsigned int i;
	int error = 0;
	pteval_t *below;

	if (level <= pt_slot_highest() && IS_ALIGNED(addr, size) && size <= mount->end - addr) {
		if (mount->pieces)
			mount->pieces[mount->count] = (struct pt_piece){
				addr, level, table, level == PG_LEVEL_4K ? entry : NULL };
		mount->count++;
		return 0;
	}
	if (level == PG_LEVEL_4K) {
		mount->tail = page;
		mount->tail_leaves = table;
		return 0;
	}
	for (i = 0; !error && i < PT_ENTRIES && page < mount->pages; i++) {
		/* Only tables of level 1 may be missing. */
		if (!table[i] && !pt_tree_make_leaf(mount->tree, page))
			return -ENOMEM;
		below = pt_tree_table(mount->tree, READ_ONCE(table[i]), page);
		error = pt_pieces_divide(mount, below, table + i, level - 1, page);
		page += pt_entry_pages(level);
	}
	return error;
}

int pt_pieces_find(struct pt_mount *mount)
{
	int error;

	mount->count = 0;
	error = pt_pieces_divide(mount, mount->tree->root, NULL, mount->tree->order, 0);
	if (error)
		return error;
	mount->pieces = kvcalloc(mount->count, sizeof(*mount->pieces), GFP_KERNEL_ACCOUNT);
	if (!mount->pieces && mount->count)
		return -ENOMEM;
	mount->count = 0;
	return pt_pieces_divide(mount, mount->tree->root, NULL, mount->tree->order, 0);
}

unsigned long pt_pieces_alignment(unsigned long len)
{
	unsigned int level = pt_slot_highest();

	while (level > PG_LEVEL_4K && pt_slot_size(level) > len)
		level--;
	return pt_slot_size(level);
}

unsigned long pt_pieces_area(struct file *file, unsigned long addr, unsigned long len,
			     unsigned long pgoff, unsigned long flags)
{
	unsigned long align = pt_pieces_alignment(len);
	unsigned long hint = 0, found;

	if (flags & MAP_FIXED)
		return IS_ALIGNED(addr, min(align, pt_slot_size(PG_LEVEL_2M))) ? addr : -EINVAL;
	if (len + align < len)
		return -ENOMEM;
	/* The core looks above what four levels cover only if the hint is there. */
	if (len + align > DEFAULT_MAP_WINDOW)
		hint = DEFAULT_MAP_WINDOW + PAGE_SIZE;
	found = pt_get_unmapped_area(file, hint, len + align, pgoff, flags);
	return IS_ERR_VALUE(found) ? found : ALIGN(found, align);
}
