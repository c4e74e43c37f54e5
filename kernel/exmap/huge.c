// SPDX-License-Identifier: GPL-2.0
/*
 * Pages of a surface that a leaf of 2 MiB maps: what commands do where an entry is not one page's.
 *
 * All of it is off the path of single pages, which comes here when it finds an entry that it cannot
 * use.
 */

#include <linux/mm.h>
#include <linux/sched.h>

#include "core/pt_huge.h"
#include "exmap/exmap.h"

/* The flags that exclude huge pages. */
#define EXMAP_NOT_WITH_HUGE \
	(VELLUM_EXMAP_PINNABLE | VELLUM_EXMAP_TRACKS | VELLUM_EXMAP_STEALING | \
	 VELLUM_EXMAP_NO_POOL | VELLUM_EXMAP_LOCK_TABLES)

bool exmap_huge_is_right(const struct vellum_exmap_create *create)
{
	if (!(create->flags & VELLUM_EXMAP_HUGE))
		return !create->blocks;
	return PT_HUGE_IS_POSSIBLE && !(create->flags & EXMAP_NOT_WITH_HUGE);
}

/* Brings a block to the 512 pages from this one. Returns the number of pages that got a frame. */
unsigned int exmap_alloc_huge(struct exmap *exmap, unsigned int index, u64 page, bool *is_there)
{
	struct frame_lane *lane = &exmap->pool.lanes[index];
	u64 frame = 0;
	int error;

	/* Looks before it takes a block in vain. */
	*is_there = pt_tree_huge(&exmap->tree, page);
	if (!*is_there)
		frame = frame_block_take(&exmap->pool);
	if (!frame)
		return 0;
	while ((error = pt_huge_put(&exmap->mount, page, frame)) == -EAGAIN) {
		cpu_relax();
		cond_resched();
	}
	if (error) {
		*is_there = error == -EEXIST;
		frame_block_give(&exmap->pool, frame);
		return 0;
	}
	lane->block_taken += FRAME_BLOCK;
	lane->taken += FRAME_BLOCK;
	return FRAME_BLOCK;
}

/*
 * Returns the leaf of a page, and makes its table where there is none. NULL: there is no memory for
 * the table, or a leaf of 2 MiB maps the page. The answer may be out of date a moment later, but
 * that is never reported as a lack of memory.
 */
pteval_t *exmap_make_leaf(struct exmap *exmap, u64 page, bool *is_huge)
{
	pteval_t *entry = pt_tree_entry(&exmap->tree, page);
	pteval_t *leaf;

	for (;;) {
		leaf = pt_tree_make_leaf(&exmap->tree, page);
		*is_huge = !leaf && pt_tree_huge(&exmap->tree, page);
		if (leaf || *is_huge || !entry || !READ_ONCE(*entry))
			return leaf;
	}
}

/*
 * Returns the leaf of a page, and splits a leaf of 2 MiB before. NULL: there is no table. An entry
 * that is neither none nor a leaf leads to a table: another thread has just split it.
 */
pteval_t *exmap_reach(struct exmap *exmap, u64 page)
{
	pteval_t *entry = pt_tree_entry(&exmap->tree, page);
	pteval_t *leaf;

	while (!(leaf = pt_tree_leaf(&exmap->tree, page)) && entry && READ_ONCE(*entry))
		pt_huge_split(&exmap->mount, page, exmap->leaf_flags);
	return leaf;
}

/* Waits until the entry is no longer splitting, and returns it. */
pteval_t exmap_wait_for_split(pteval_t *leaf)
{
	pteval_t value;

	while ((value = READ_ONCE(*leaf)) == PT_SPLITTING) {
		cpu_relax();
		cond_resched();
	}
	return value;
}

/*
 * Waits until a frame can be put on the page, or was put there. False: a leaf of 2 MiB maps the
 * page.
 */
bool exmap_wait(struct exmap *exmap, pteval_t *leaf, u64 page)
{
	for (;;) {
		pteval_t value = READ_ONCE(*leaf);

		if (value != EXMAP_LEAVING && value != PT_CLAIMED && value != PT_SPLITTING)
			return true;
		if (value == PT_CLAIMED && pt_tree_huge(&exmap->tree, page))
			return false;
		cpu_relax();
		cond_resched();
	}
}

/* Returns the frame of a page, however it is mapped; 0: it has none. */
u64 exmap_frame(struct exmap *exmap, u64 page)
{
	for (;;) {
		pteval_t *leaf = pt_tree_leaf(&exmap->tree, page);
		pteval_t value = leaf ? READ_ONCE(*leaf) : 0;
		pteval_t huge;

		if (exmap_has_frame(exmap, value))
			return pt_leaf_pfn(value);
		if (value == PT_SPLITTING) {
			exmap_wait_for_split(leaf);
			continue;
		}
		if (leaf && value != PT_CLAIMED)
			return 0;
		huge = pt_tree_huge(&exmap->tree, page);
		if (huge)
			return pt_leaf_pfn(huge) + page % PT_ENTRIES;
		/* Another thread may have split it after the read. */
		if (leaf ? READ_ONCE(*leaf) == PT_CLAIMED : !pt_tree_leaf(&exmap->tree, page))
			return 0;
	}
}

/*
 * Whether a fault at a page without a leaf of its own is to be tried again: a leaf of 2 MiB maps
 * the page, or that is just changing, or has just changed.
 */
bool exmap_may_be_huge(struct exmap *exmap, u64 page)
{
	pteval_t *leaf = pt_tree_leaf(&exmap->tree, page);
	pteval_t value = leaf ? READ_ONCE(*leaf) : 0;

	if (leaf)
		return value == PT_CLAIMED || value == PT_SPLITTING || value & _PAGE_PRESENT;
	return pt_tree_huge(&exmap->tree, page) || pt_tree_leaf(&exmap->tree, page);
}
