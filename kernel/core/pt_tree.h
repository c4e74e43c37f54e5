/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Subtrees of page tables that the module owns.
 *
 * A tree of order n is a table of level n and what hangs below it: level 1 is the table whose
 * entries are pages, one of level n covers 512^n pages. It is built, filled and emptied without
 * regard to whether a process has it mounted (pt_mount.h): its entries are what the processor
 * reads, so that a frame put here is visible wherever the tree is mounted.
 *
 * What holds:
 * - an entry changes from none to a table once, and back only by pt_tree_unlink_empty(): a walker
 *   that found a table may go on using it for as long as the tree lives and is not pruned. While 512
 *   pages have a leaf of 2 MiB instead of the table (pt_huge.h), the tree keeps the table elsewhere,
 *   and nothing can be put into it;
 * - leaves change by atomic operations alone, so that each change has one winner;
 * - no entry above level 2 is ever none. The core would put tables of its own there, and count them
 *   for the process. In a tree for a surface all tables of level 2 and above are there from the
 *   start. In a sparse tree a guard is in the place of those that are not: a table of level 2 that
 *   all sparse trees share, and which stays empty, as nothing but a fault gets there; and in the
 *   place of one of level 3, a table with nothing but that.
 */
#ifndef VELLUM_PT_TREE_H
#define VELLUM_PT_TREE_H

#include <linux/io.h>
#include <linux/mm.h>
#include <linux/types.h>
#include <linux/xarray.h>

#define PT_ENTRIES	512
#define PT_INDEX_BITS	9
#define PT_MAX_ORDER	4

/*
 * The entry that points to a table. With less than these rights the core takes an entry for a
 * damaged one and clears it; rights are restricted in the leaves.
 */
#define PT_TABLE_FLAGS	(_KERNPG_TABLE | _PAGE_USER)

/*
 * Rights and state of a leaf. Accessed and dirty from the start: so no access needs to set them,
 * and the core never finds a reason to write the entry.
 */
#define PT_LEAF_FLAGS \
	(_PAGE_PRESENT | _PAGE_RW | _PAGE_USER | _PAGE_ACCESSED | _PAGE_DIRTY | _PAGE_NX | \
	 _PAGE_ENC)

/*
 * Who pays for the tables of a tree, and where they are. Without a source they are the kernel's
 * memory, and the caller pays. Persistent memory is a source: its guard must be there, too.
 */
struct pt_source {
	u64	*(*alloc)(struct pt_source *source, unsigned int level);
	void	(*free)(struct pt_source *source, u64 *table, unsigned int level);
	/* Of sparse trees, of level 2: such trees are of order 3 at most. */
	u64	*guard;
};

/*
 * An entry of level 1 that is claimed: none for the core and the processor, and only the thread that
 * has claimed it may change it.
 */
#define PT_CLAIMED	((u64)_PAGE_DIRTY)

struct pt_tree {
	struct pt_source *source;	/* NULL: the kernel's memory */
	bool		is_sparse;
	unsigned int	order;
	u64		pages;		/* that may have a leaf; the extent may be larger */
	u64		*root;
	atomic_long_t	tables;

	/* Tables in whose place there is, or was, a leaf of 2 MiB; by the number of 512 pages. */
	struct xarray	deposits;
	atomic_long_t	huge, splits;	/* such leaves now; how many became 512 leaves */
};

int pt_tree_init(struct pt_tree *tree, u64 pages, struct pt_source *source);
int pt_tree_init_sparse(struct pt_tree *tree, unsigned int order, struct pt_source *source);
/* Makes a sparse tree of tables that are there. */
void pt_tree_adopt(struct pt_tree *tree, unsigned int order, struct pt_source *source, u64 *root);
/* Lets go of the tables without freeing them. */
void pt_tree_release(struct pt_tree *tree);
void pt_tree_destroy(struct pt_tree *tree);
u64 *__pt_tree_make_leaf(struct pt_tree *tree, u64 page);
/* The entry of level 2 that the page is below; NULL when there is no memory for its table. */
u64 *pt_tree_make_entry(struct pt_tree *tree, u64 page);
/*
 * For how many pages, this one among them, a guard is in the place of a table; 0: the page's table
 * of level 2 is there. When the table comes, processors may still know the guard: flush what they
 * keep of tables for all of these pages.
 */
u64 pt_tree_guarded(struct pt_tree *tree, u64 page);
/* How many tables are not there yet on the way to the page's leaf; none where 2 MiB are one. */
unsigned int pt_tree_missing(struct pt_tree *tree, u64 page);
/* Shows all leaves that are not empty, in order; one of 2 MiB as 512. */
void pt_tree_each_leaf(struct pt_tree *tree, void (*visit)(void *data, u64 page, u64 leaf),
		       void *data);

/*
 * Tables of level 1 without a leaf go from a surface's tree, as far as tables of level 2 lead to them
 * that a mount covers as a whole. A leaf equal to `zeros` counts as none and is dropped. The first
 * function takes them off, the second one frees them, once secondary MMUs were told in between.
 *
 * No processor walks the tree meanwhile: it is detached, and stays so. No other thread holds a table
 * of it, but for one under RCU: that thread finds claimed entries. May sleep.
 */
void pt_tree_unlink_empty(struct pt_tree *tree, u64 zeros, struct list_head *empty);
void pt_tree_free_unlinked(struct pt_tree *tree, struct list_head *empty);

/*
 * Claims all entries of a table of level 1, each from none, or claims none of them and returns the
 * first entry that was not none. Of several threads the one that gets the first entry gets all.
 */
u64 pt_table_claim(u64 *table);

/* The table that an entry above leads to for this page, also where a leaf is in its place. */
u64 *pt_tree_table(struct pt_tree *tree, u64 entry, u64 page);

/* The guards of sparse trees. */
int pt_tree_start(void);
void pt_tree_end(void);

/* Tables on their own. */
u64 *pt_table_alloc(unsigned int level);
void pt_table_free(u64 *table, unsigned int level);

/* Pages that an entry of a table of this level covers. */
static inline u64 pt_entry_pages(unsigned int level)
{
	return 1ULL << (PT_INDEX_BITS * (level - 1));
}

static inline u64 *pt_entry_table(u64 entry)
{
	return __va(entry & PTE_PFN_MASK);
}

static inline u64 pt_table_entry(u64 *table)
{
	return __pa(table) | PT_TABLE_FLAGS;
}

/* Neither none nor a leaf of 2 MiB. */
static inline bool pt_entry_is_table(u64 entry)
{
	return (entry & (_PAGE_PRESENT | _PAGE_PSE)) == _PAGE_PRESENT;
}

static inline u64 pt_leaf_pfn(u64 leaf)
{
	return (leaf & PTE_PFN_MASK) >> PAGE_SHIFT;
}

/*
 * The entry of level 2 that the page is below, or NULL in a tree that has none. The page is one of
 * the tree's.
 */
static inline u64 *pt_tree_entry(struct pt_tree *tree, u64 page)
{
	unsigned int shift = PT_INDEX_BITS * (tree->order - 1);
	u64 *table = tree->root;

	if (!shift)
		return NULL;
	for (; shift > PT_INDEX_BITS; shift -= PT_INDEX_BITS)
		table = pt_entry_table(READ_ONCE(table[(page >> shift) & (PT_ENTRIES - 1)]));
	return table + ((page >> shift) & (PT_ENTRIES - 1));
}

/* The leaf of 2 MiB that the page is in, or 0. */
static inline u64 pt_tree_huge(struct pt_tree *tree, u64 page)
{
	u64 *entry = pt_tree_entry(tree, page);
	u64 value = entry ? READ_ONCE(*entry) : 0;

	return value & _PAGE_PSE ? value : 0;
}

/* What the leaf of a page would be that is in this one of 2 MiB. */
static inline u64 pt_huge_part(u64 huge, u64 page)
{
	return (huge & ~(u64)_PAGE_PSE) + ((page % PT_ENTRIES) << PAGE_SHIFT);
}

/* The leaf of a page, or NULL where there is no table for it yet, or it is in a leaf of 2 MiB. */
static inline u64 *pt_tree_leaf(struct pt_tree *tree, u64 page)
{
	unsigned int shift = PT_INDEX_BITS * (tree->order - 1);
	u64 *table = tree->root;

	for (; shift; shift -= PT_INDEX_BITS) {
		u64 entry = READ_ONCE(table[(page >> shift) & (PT_ENTRIES - 1)]);

		if (unlikely(!pt_entry_is_table(entry)))
			return NULL;
		table = pt_entry_table(entry);
	}
	return table + (page & (PT_ENTRIES - 1));
}

/*
 * The leaf of a page; NULL when there is no memory for its table, or it is in a leaf of 2 MiB. May
 * sleep.
 */
static inline u64 *pt_tree_make_leaf(struct pt_tree *tree, u64 page)
{
	u64 *leaf = pt_tree_leaf(tree, page);

	return likely(leaf) ? leaf : __pt_tree_make_leaf(tree, page);
}

#endif /* VELLUM_PT_TREE_H */
