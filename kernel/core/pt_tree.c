// SPDX-License-Identifier: GPL-2.0
/* Subtrees of page tables: made, walked, freed. See pt_tree.h for what holds. */

#include <linux/memcontrol.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>

#include "core/compat.h"
#include "core/pt_tree.h"

u64 *pt_table_alloc(unsigned int level)
{
	struct page *page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);

	if (!page)
		return NULL;
	if (!pt_table_construct(page, level)) {
		__free_page(page);
		return NULL;
	}
	return page_address(page);
}

void pt_table_free(u64 *table, unsigned int level)
{
	struct page *page = virt_to_page(table);

	pt_table_destruct(page, level);
	__free_page(page);
}

/* The table below the entry, made if there is none. Whoever loses the race frees his. */
static u64 *table_below(struct pt_tree *tree, u64 *entry, unsigned int level)
{
	u64 value = READ_ONCE(*entry);
	u64 *table;

	if (value)
		return pt_entry_is_table(value) ? pt_entry_table(value) : NULL;
	table = pt_table_alloc(level);
	if (!table)
		return NULL;
	/* A full barrier: the table is zeroed before anybody can walk into it. */
	value = cmpxchg64(entry, 0, pt_table_entry(table));
	if (value) {
		pt_table_free(table, level);
		return pt_entry_is_table(value) ? pt_entry_table(value) : NULL;
	}
	atomic_long_inc(&tree->tables);
	return table;
}

/*
 * The table of this level that the page is in; NULL when there is no memory for it, or a leaf in
 * its place.
 */
static u64 *make_table(struct pt_tree *tree, u64 page, unsigned int lowest)
{
	u64 *table = tree->root;
	unsigned int level;

	for (level = tree->order; table && level > lowest; level--) {
		u64 index = (page >> (PT_INDEX_BITS * (level - 1))) & (PT_ENTRIES - 1);

		table = table_below(tree, table + index, level - 1);
	}
	return table;
}

u64 *__pt_tree_make_leaf(struct pt_tree *tree, u64 page)
{
	u64 *table = make_table(tree, page, 1);

	return table ? table + (page & (PT_ENTRIES - 1)) : NULL;
}

u64 *pt_tree_table(struct pt_tree *tree, u64 entry, u64 page)
{
	return pt_entry_is_table(entry) ? pt_entry_table(entry) :
					  xa_load(&tree->deposits, page / PT_ENTRIES);
}

/* Shows all leaves that are not empty, in order; one of 2 MiB as 512. */
void pt_tree_each_leaf(struct pt_tree *tree, void (*visit)(void *data, u64 page, u64 leaf),
		       void *data)
{
	u64 page = 0, *leaf, value, huge;
	unsigned int i;

	for (; tree->root && page < tree->pages; page += PT_ENTRIES) {
		leaf = pt_tree_leaf(tree, page);
		huge = leaf ? 0 : pt_tree_huge(tree, page);
		cond_resched();
		for (i = 0; (leaf || huge) && i < PT_ENTRIES; i++) {
			value = leaf ? READ_ONCE(leaf[i]) :
				       (huge & ~(u64)_PAGE_PSE) + ((u64)i << PAGE_SHIFT);
			if (value)
				visit(data, page + i, value);
		}
	}
}

/* Frees a table and all below it; what the leaves refer to is the owner's business. */
static void free_below(struct pt_tree *tree, u64 *table, unsigned int level, u64 page)
{
	unsigned int i;

	for (i = 0; level > 1 && i < PT_ENTRIES; i++, page += pt_entry_pages(level))
		if (table[i])
			free_below(tree, pt_tree_table(tree, table[i], page), level - 1, page);
	pt_table_free(table, level);
	atomic_long_dec(&tree->tables);
	cond_resched();
}

void pt_tree_destroy(struct pt_tree *tree)
{
	if (!tree->root)
		return;
	/* The core walks page tables under RCU, without locks. */
	synchronize_rcu();
	free_below(tree, tree->root, tree->order, 0);
	WARN_ON_ONCE(atomic_long_read(&tree->tables));
	xa_destroy(&tree->deposits);
	tree->root = NULL;
}

/* Makes a tree for so many pages, without leaves. */
int pt_tree_init(struct pt_tree *tree, u64 pages)
{
	u64 page;

	if (!pages || pages > 1ULL << (PT_INDEX_BITS * PT_MAX_ORDER))
		return -EINVAL;
	tree->order = 1;
	while (1ULL << (PT_INDEX_BITS * tree->order) < pages)
		tree->order++;
	tree->pages = pages;
	tree->root = pt_table_alloc(tree->order);
	if (!tree->root)
		return -ENOMEM;
	atomic_long_set(&tree->tables, 1);
	atomic_long_set(&tree->huge, 0);
	atomic_long_set(&tree->splits, 0);
	xa_init_flags(&tree->deposits, XA_FLAGS_ACCOUNT);

	for (page = 0; tree->order > 2 && page < pages; page += pt_entry_pages(3)) {
		if (!make_table(tree, page, 2) || fatal_signal_pending(current)) {
			pt_tree_destroy(tree);
			return -ENOMEM;
		}
		cond_resched();
	}
	return 0;
}
