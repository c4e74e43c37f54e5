/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Subtrees of page tables that the module owns.
 *
 * A tree of order n is a table of level n and all tables below it. A table of level n covers 512^n
 * pages. In code the levels have the kernel's names, by what an entry covers: those of a table of
 * level 1 are pages (PG_LEVEL_4K), one of level 2 covers 2 MiB (PG_LEVEL_2M), one of level 3 1 GiB
 * (PG_LEVEL_1G), and one of level 4 512 GiB (PG_LEVEL_512G). The module builds, fills and empties a
 * tree whether or not a process has it mounted (pt_mount.h). The CPU reads these very entries, so a
 * frame that is put here is visible wherever the tree is mounted.
 *
 * An entry of any level has the type pteval_t, because a walker knows the level only at run time.
 * Numbers of pages and of frames are u64.
 *
 * Invariants:
 *
 * - An entry changes from none to a table once, and back only by pt_tree_unlink_empty(). A walker
 *   that found a table may go on using it for as long as the tree lives and is not pruned. While a
 *   leaf of 2 MiB replaces a table (pt_huge.h), the tree keeps the table elsewhere, and nothing can
 *   be put into it.
 * - Leaves change by atomic operations alone, so each change has one winner.
 * - No entry above level 2 is ever none. The core would put tables of its own there, and count them
 *   for the process. A tree for a surface has all tables of level 2 and above from the start. A
 *   sparse tree has guards in the place of missing tables: a table of level 2 that all sparse trees
 *   share, and that stays empty, as nothing but a fault gets there; and in the place of a table of
 *   level 3 a table with nothing but entries for that guard.
 */
#ifndef VELLUM_PT_TREE_H
#define VELLUM_PT_TREE_H

#include <linux/io.h>
#include <linux/mm.h>
#include <linux/types.h>
#include <linux/xarray.h>

#define PT_ENTRIES	512
#define PT_INDEX_BITS	9
#define PT_MAX_ORDER	PG_LEVEL_512G

/*
 * The flags of an entry that points to a table. With fewer rights than these the core takes the
 * entry for a damaged one and clears it. Leaves restrict rights.
 */
#define PT_TABLE_FLAGS	(_KERNPG_TABLE | _PAGE_USER)

/*
 * The rights and the state of a leaf. It is accessed and dirty from the start, so no access needs
 * to set these bits, and the core never finds a reason to write the entry.
 */
#define PT_LEAF_FLAGS \
	(_PAGE_PRESENT | _PAGE_RW | _PAGE_USER | _PAGE_ACCESSED | _PAGE_DIRTY | _PAGE_NX | \
	 _PAGE_ENC)

/*
 * Where the tables of a tree come from, and what they are charged to. Without a source they are the
 * kernel's memory, and the caller pays. Persistent memory is a source, and has a guard of its own.
 */
struct pt_source {
	pteval_t	*(*alloc)(struct pt_source *source, unsigned int level);
	void		(*free)(struct pt_source *source, pteval_t *table, unsigned int level);
	/* The guard of level 2 for sparse trees. Such trees have order 3 at most. */
	pteval_t	*guard;
};

/*
 * A claimed entry of level 1. It is none for the core and the CPU, and only the thread that has
 * claimed it may change it.
 */
#define PT_CLAIMED	_PAGE_DIRTY

struct pt_tree {
	struct pt_source *source;	/* NULL: the kernel's memory */
	bool		is_sparse;
	unsigned int	order;
	u64		pages;		/* that may have a leaf; the extent may be larger */
	pteval_t	*root;
	atomic_long_t	tables;

	/* Tables that a leaf of 2 MiB replaces, or has replaced, by page number / 512. */
	struct xarray	deposits;
	atomic_long_t	huge, splits;	/* leaves of 2 MiB now; leaves that were split */
};

int pt_tree_init(struct pt_tree *tree, u64 pages, struct pt_source *source);
int pt_tree_init_sparse(struct pt_tree *tree, unsigned int order, struct pt_source *source);
/*
 * Puts a table of the next level above a sparse tree's root. Mounts of the tree stay as they are.
 * No other thread uses the root or the order meanwhile.
 */
int pt_tree_grow(struct pt_tree *tree);
/* Makes a sparse tree of existing tables. */
void pt_tree_adopt(struct pt_tree *tree, unsigned int order, struct pt_source *source,
		   pteval_t *root);
/* Gives up the tables without freeing them. */
void pt_tree_release(struct pt_tree *tree);
void pt_tree_destroy(struct pt_tree *tree);
/* Like pt_tree_destroy(), for a caller that has waited for RCU. */
void pt_tree_free_tables(struct pt_tree *tree);
pteval_t *__pt_tree_make_leaf(struct pt_tree *tree, u64 page);
/* Returns the entry of level 2 above the page; NULL when there is no memory for its table. */
pteval_t *pt_tree_make_entry(struct pt_tree *tree, u64 page);
/*
 * The number of pages around this one for which a guard replaces a table; 0: the page's table of
 * level 2 is there. When the table comes, CPUs may still cache the guard. The caller then flushes
 * what they cache of tables for all of these pages.
 */
u64 pt_tree_guarded(struct pt_tree *tree, u64 page);
/*
 * The number of tables missing on the way to the page's leaf; 0 where a leaf of 2 MiB maps the
 * page.
 */
unsigned int pt_tree_missing(struct pt_tree *tree, u64 page);
/* Calls the function for all leaves that are not empty, in order. A leaf of 2 MiB counts as 512. */
void pt_tree_each_leaf(struct pt_tree *tree, void (*visit)(void *data, u64 page, pteval_t leaf),
		       void *data);

/*
 * Free the tables of level 1 without a leaf in a surface's tree, where a mount covers the table of
 * level 2 above as a whole. A leaf equal to `zeros` counts as none and is dropped. The first
 * function takes the tables off. The second one frees them. The caller tells secondary MMUs in
 * between.
 *
 * No CPU walks the tree meanwhile: it is detached, and stays so. No other thread uses a table of
 * it, except under RCU; such a thread finds claimed entries. May sleep.
 */
void pt_tree_unlink_empty(struct pt_tree *tree, pteval_t zeros, struct list_head *empty);
void pt_tree_free_unlinked(struct pt_tree *tree, struct list_head *empty);

/*
 * Claims all entries of a table of level 1, each from none. If an entry is not none, claims no
 * entry and returns it. Of several threads the one that gets the first entry gets all.
 */
pteval_t pt_table_claim(pteval_t *table);

/* Returns the page's table below an entry, also where a leaf replaces the table. */
pteval_t *pt_tree_table(struct pt_tree *tree, pteval_t entry, u64 page);

/* Make and free the guards of sparse trees. */
int pt_tree_start(void);
void pt_tree_end(void);

/* Make and free single tables. */
pteval_t *pt_table_alloc(unsigned int level);
void pt_table_free(pteval_t *table, unsigned int level);

/* The number of pages that an entry of a table of this level covers. */
static inline u64 pt_entry_pages(unsigned int level)
{
	return 1ULL << (PT_INDEX_BITS * (level - 1));
}

/* The least order of a tree for so many pages; above PT_MAX_ORDER where no tree has room. */
static inline unsigned int pt_order_for(u64 pages)
{
	unsigned int order = 1;

	while (order <= PT_MAX_ORDER && 1ULL << (PT_INDEX_BITS * order) < pages)
		order++;
	return order;
}

static inline pteval_t *pt_entry_table(pteval_t entry)
{
	return __va(entry & PTE_PFN_MASK);
}

static inline pteval_t pt_table_entry(pteval_t *table)
{
	return __pa(table) | PT_TABLE_FLAGS;
}

/* Whether the entry is neither none nor a leaf of 2 MiB. */
static inline bool pt_entry_is_table(pteval_t entry)
{
	return (entry & (_PAGE_PRESENT | _PAGE_PSE)) == _PAGE_PRESENT;
}

static inline u64 pt_leaf_pfn(pteval_t leaf)
{
	return (leaf & PTE_PFN_MASK) >> PAGE_SHIFT;
}

/* The entry of level 2 above the page, or NULL in a tree that has none. The tree has the page. */
static inline pteval_t *pt_tree_entry(struct pt_tree *tree, u64 page)
{
	unsigned int shift = PT_INDEX_BITS * (tree->order - 1);
	pteval_t *table = tree->root;

	if (!shift)
		return NULL;
	for (; shift > PT_INDEX_BITS; shift -= PT_INDEX_BITS)
		table = pt_entry_table(READ_ONCE(table[(page >> shift) & (PT_ENTRIES - 1)]));
	return table + ((page >> shift) & (PT_ENTRIES - 1));
}

/* The leaf of 2 MiB that the page is in, or 0. */
static inline pteval_t pt_tree_huge(struct pt_tree *tree, u64 page)
{
	pteval_t *entry = pt_tree_entry(tree, page);
	pteval_t value = entry ? READ_ONCE(*entry) : 0;

	return value & _PAGE_PSE ? value : 0;
}

/* The leaf that the page would have if this leaf of 2 MiB were split. */
static inline pteval_t pt_huge_part(pteval_t huge, u64 page)
{
	return (huge & ~_PAGE_PSE) + ((page % PT_ENTRIES) << PAGE_SHIFT);
}

/* The leaf of a page; NULL where there is no table for it yet, or a leaf of 2 MiB maps the page. */
static inline pteval_t *pt_tree_leaf(struct pt_tree *tree, u64 page)
{
	unsigned int shift = PT_INDEX_BITS * (tree->order - 1);
	pteval_t *table = tree->root;

	for (; shift; shift -= PT_INDEX_BITS) {
		pteval_t entry = READ_ONCE(table[(page >> shift) & (PT_ENTRIES - 1)]);

		if (unlikely(!pt_entry_is_table(entry)))
			return NULL;
		table = pt_entry_table(entry);
	}
	return table + (page & (PT_ENTRIES - 1));
}

/*
 * The leaf of a page, with its table made; NULL when there is no memory for the table, or a leaf of
 * 2 MiB maps the page. May sleep.
 */
static inline pteval_t *pt_tree_make_leaf(struct pt_tree *tree, u64 page)
{
	pteval_t *leaf = pt_tree_leaf(tree, page);

	return likely(leaf) ? leaf : __pt_tree_make_leaf(tree, page);
}

#endif /* VELLUM_PT_TREE_H */
