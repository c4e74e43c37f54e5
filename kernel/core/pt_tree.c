// SPDX-License-Identifier: GPL-2.0
/* Subtrees of page tables: made, walked, freed. pt_tree.h lists their invariants. */

#include <linux/memcontrol.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>

#include "core/compat.h"
#include "core/pt_tree.h"

pteval_t *pt_table_alloc(unsigned int level)
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

void pt_table_free(pteval_t *table, unsigned int level)
{
	struct page *page = virt_to_page(table);

	pt_table_destruct(page, level);
	__free_page(page);
}

/*
 * Guards by level. A walk through guards of higher levels ends in the guard of level 2, for every
 * page.
 */
static pteval_t *pt_tree_guards[PT_MAX_ORDER];

static void pt_table_fill(pteval_t *table, pteval_t entry)
{
	unsigned int i;

	for (i = 0; i < PT_ENTRIES; i++)
		table[i] = entry;
}

int pt_tree_start(void)
{
	unsigned int level;

	for (level = PG_LEVEL_2M; level < PT_MAX_ORDER; level++) {
		pt_tree_guards[level] = pt_table_alloc(level);
		if (!pt_tree_guards[level]) {
			pt_tree_end();
			return -ENOMEM;
		}
		if (level > PG_LEVEL_2M)
			pt_table_fill(pt_tree_guards[level],
				      pt_table_entry(pt_tree_guards[level - 1]));
	}
	return 0;
}

void pt_tree_end(void)
{
	unsigned int level;

	/* The core walks page tables under RCU, without locks. */
	synchronize_rcu();
	for (level = PG_LEVEL_2M; level < PT_MAX_ORDER && pt_tree_guards[level]; level++)
		pt_table_free(pt_tree_guards[level], level);
}

/* The guard in the place of a table of this level. */
static pteval_t *pt_tree_guard(const struct pt_tree *tree, unsigned int level)
{
	return tree->source ? tree->source->guard : pt_tree_guards[level];
}

/* The CPU sets the accessed bit of an entry that it walks through. */
static bool pt_tree_is_guard(const struct pt_tree *tree, pteval_t entry, unsigned int level)
{
	return level > PG_LEVEL_4K && entry && pt_entry_table(entry) == pt_tree_guard(tree, level);
}

static pteval_t *pt_tree_alloc_table(struct pt_tree *tree, unsigned int level)
{
	pteval_t *table = tree->source ? tree->source->alloc(tree->source, level) :
					 pt_table_alloc(level);

	if (!table)
		return NULL;
	atomic_long_inc(&tree->tables);
	if (tree->is_sparse && level > PG_LEVEL_2M)
		pt_table_fill(table, pt_table_entry(pt_tree_guard(tree, level - 1)));
	return table;
}

static void pt_tree_free_table(struct pt_tree *tree, pteval_t *table, unsigned int level)
{
	if (tree->source)
		tree->source->free(tree->source, table, level);
	else
		pt_table_free(table, level);
	atomic_long_dec(&tree->tables);
}

unsigned int pt_tree_missing(struct pt_tree *tree, u64 page)
{
	pteval_t *table = tree->root;
	unsigned int level;
	pteval_t entry;

	for (level = tree->order; level > PG_LEVEL_4K; level--) {
		entry = READ_ONCE(table[(page / pt_entry_pages(level)) % PT_ENTRIES]);
		if (!entry || pt_tree_is_guard(tree, entry, level - 1))
			return level - 1;
		if (!pt_entry_is_table(entry))
			return 0;
		table = pt_entry_table(entry);
	}
	return 0;
}

u64 pt_tree_guarded(struct pt_tree *tree, u64 page)
{
	unsigned int missing = pt_tree_missing(tree, page);

	return missing > PG_LEVEL_4K ? pt_entry_pages(missing + 1) : 0;
}

static pteval_t *pt_entry_table_or_null(pteval_t entry)
{
	return pt_entry_is_table(entry) ? pt_entry_table(entry) : NULL;
}

/*
 * Returns the table below the entry, and makes it if there is none. A thread that loses the race
 * frees its own table.
 */
static pteval_t *pt_tree_table_below(struct pt_tree *tree, pteval_t *entry, unsigned int level)
{
	pteval_t value = READ_ONCE(*entry);
	pteval_t *table;

	if (value && !pt_tree_is_guard(tree, value, level))
		return pt_entry_table_or_null(value);
	table = pt_tree_alloc_table(tree, level);
	if (!table)
		return NULL;
	/* A full barrier: the table is zeroed before a CPU can walk into it. */
	while (!try_cmpxchg(entry, &value, pt_table_entry(table))) {
		if (!pt_tree_is_guard(tree, value, level)) {
			pt_tree_free_table(tree, table, level);
			return pt_entry_table_or_null(value);
		}
	}
	return table;
}

/*
 * Returns the table of this level that the page is in, and makes it. NULL: there is no memory for
 * it, or a leaf in its place.
 */
static pteval_t *pt_tree_make_table(struct pt_tree *tree, u64 page, unsigned int lowest)
{
	pteval_t *table = tree->root;
	unsigned int level;

	for (level = tree->order; table && level > lowest; level--) {
		u64 index = (page >> (PT_INDEX_BITS * (level - 1))) & (PT_ENTRIES - 1);

		table = pt_tree_table_below(tree, table + index, level - 1);
	}
	return table;
}

pteval_t *__pt_tree_make_leaf(struct pt_tree *tree, u64 page)
{
	pteval_t *table = pt_tree_make_table(tree, page, PG_LEVEL_4K);

	return table ? table + (page & (PT_ENTRIES - 1)) : NULL;
}

pteval_t *pt_tree_make_entry(struct pt_tree *tree, u64 page)
{
	pteval_t *table = pt_tree_make_table(tree, page, PG_LEVEL_2M);

	return table ? table + ((page >> PT_INDEX_BITS) & (PT_ENTRIES - 1)) : NULL;
}

pteval_t *pt_tree_table(struct pt_tree *tree, pteval_t entry, u64 page)
{
	return pt_entry_is_table(entry) ? pt_entry_table(entry) :
					  xa_load(&tree->deposits, page / PT_ENTRIES);
}

typedef void (*pt_visit_leaf)(void *data, u64 page, pteval_t leaf);

static void pt_tree_each_part(pteval_t huge, u64 page, pt_visit_leaf visit, void *data)
{
	u64 i;

	for (i = 0; i < PT_ENTRIES; i++)
		visit(data, page + i, pt_huge_part(huge, page + i));
}

static void pt_tree_each_below(struct pt_tree *tree, const pteval_t *table, unsigned int level,
			       u64 page, pt_visit_leaf visit, void *data)
{
	unsigned int i;
	pteval_t value;

	cond_resched();
	for (i = 0; i < PT_ENTRIES; i++, page += pt_entry_pages(level)) {
		value = READ_ONCE(table[i]);
		if (!value || (level > PG_LEVEL_2M && pt_tree_is_guard(tree, value, level - 1)))
			continue;
		if (level == PG_LEVEL_4K)
			visit(data, page, value);
		else if (pt_entry_is_table(value))
			pt_tree_each_below(tree, pt_entry_table(value), level - 1, page, visit,
					   data);
		else
			pt_tree_each_part(value, page, visit, data);
	}
}

void pt_tree_each_leaf(struct pt_tree *tree, pt_visit_leaf visit, void *data)
{
	if (tree->root)
		pt_tree_each_below(tree, tree->root, tree->order, 0, visit, data);
}

/* Frees a table and all tables below it. The owner takes care of what the leaves refer to. */
static void pt_tree_free_below(struct pt_tree *tree, pteval_t *table, unsigned int level, u64 page)
{
	unsigned int i;
	pteval_t *below;

	for (i = 0; level > PG_LEVEL_4K && i < PT_ENTRIES; i++, page += pt_entry_pages(level)) {
		below = table[i] ? pt_tree_table(tree, table[i], page) : NULL;
		if (below && below != pt_tree_guard(tree, level - 1))
			pt_tree_free_below(tree, below, level - 1, page);
	}
	pt_tree_free_table(tree, table, level);
	cond_resched();
}

void pt_tree_free_tables(struct pt_tree *tree)
{
	if (!tree->root)
		return;
	pt_tree_free_below(tree, tree->root, tree->order, 0);
	WARN_ON_ONCE(atomic_long_read(&tree->tables));
	xa_destroy(&tree->deposits);
	tree->root = NULL;
}

void pt_tree_destroy(struct pt_tree *tree)
{
	/* The core walks page tables under RCU, without locks. */
	if (tree->root)
		synchronize_rcu();
	pt_tree_free_tables(tree);
}

static void pt_tree_begin(struct pt_tree *tree, unsigned int order, u64 pages,
			  struct pt_source *source)
{
	tree->source = source;
	tree->is_sparse = false;
	tree->order = order;
	tree->pages = pages;
	atomic_long_set(&tree->tables, 0);
	atomic_long_set(&tree->huge, 0);
	atomic_long_set(&tree->splits, 0);
	xa_init_flags(&tree->deposits, XA_FLAGS_ACCOUNT);
}

/* Makes a tree of one table, which covers all of its extent. */
int pt_tree_init_sparse(struct pt_tree *tree, unsigned int order, struct pt_source *source)
{
	pt_tree_begin(tree, order, 1ULL << (PT_INDEX_BITS * order), source);
	tree->is_sparse = true;
	tree->root = pt_tree_alloc_table(tree, order);
	return tree->root ? 0 : -ENOMEM;
}

int pt_tree_grow(struct pt_tree *tree)
{
	unsigned int order = tree->order + 1;
	pteval_t *root = order > PT_MAX_ORDER ? NULL : pt_tree_alloc_table(tree, order);

	if (!root)
		return -ENOMEM;
	root[0] = pt_table_entry(tree->root);
	tree->root = root;
	tree->order = order;
	tree->pages = 1ULL << (PT_INDEX_BITS * order);
	return 0;
}

static long pt_tree_count_tables(struct pt_tree *tree, const pteval_t *table, unsigned int level)
{
	unsigned int i;
	long count = 1;

	for (i = 0; level > PG_LEVEL_4K && i < PT_ENTRIES; i++)
		if (pt_entry_is_table(table[i]) &&
		    !(level > PG_LEVEL_2M && pt_tree_is_guard(tree, table[i], level - 1)))
			count += pt_tree_count_tables(tree, pt_entry_table(table[i]), level - 1);
	return count;
}

void pt_tree_adopt(struct pt_tree *tree, unsigned int order, struct pt_source *source,
		   pteval_t *root)
{
	pt_tree_begin(tree, order, 1ULL << (PT_INDEX_BITS * order), source);
	tree->is_sparse = true;
	tree->root = root;
	atomic_long_set(&tree->tables, pt_tree_count_tables(tree, root, order));
}

void pt_tree_release(struct pt_tree *tree)
{
	tree->root = NULL;
	xa_destroy(&tree->deposits);
}

pteval_t pt_table_claim(pteval_t *table)
{
	unsigned int i;
	pteval_t old = 0;

	for (i = 0; i < PT_ENTRIES && !old; i++)
		old = cmpxchg(table + i, 0, PT_CLAIMED);
	if (!old)
		return 0;
	for (i--; i--;)
		WRITE_ONCE(table[i], 0);
	return old;
}

/* Claims a table without leaves, after dropping the leaves that show zeros. */
static bool pt_table_claim_empty(pteval_t *table, pteval_t zeros)
{
	unsigned int i;
	pteval_t value;

	for (i = 0; i < PT_ENTRIES; i++) {
		value = READ_ONCE(table[i]);
		if (value && (!zeros || value != zeros))
			return false;
	}
	for (i = 0; zeros && i < PT_ENTRIES; i++)
		cmpxchg(table + i, zeros, 0);
	return !pt_table_claim(table);
}

/* Takes empty tables of level 1 off those of level 2, and puts them on the list. */
static void __pt_tree_unlink_empty(struct pt_tree *tree, pteval_t *table, unsigned int level,
				   u64 page, pteval_t zeros, struct list_head *empty)
{
	unsigned int i;
	pteval_t *below;

	for (i = 0; i < PT_ENTRIES; i++, page += pt_entry_pages(level)) {
		/*
		 * A mount that does not cover a table of level 2 has entries of its own for the
		 * tables below it, and for the tail. Those tables stay. Later entries have no
		 * tables.
		 */
		if (level == PG_LEVEL_1G && page + pt_entry_pages(PG_LEVEL_1G) > tree->pages)
			return;
		below = pt_entry_table_or_null(READ_ONCE(table[i]));
		if (below && level > PG_LEVEL_2M) {
			__pt_tree_unlink_empty(tree, below, level - 1, page, zeros, empty);
		} else if (below && pt_table_claim_empty(below, zeros)) {
			xa_erase(&tree->deposits, page / PT_ENTRIES);
			WRITE_ONCE(table[i], 0);
			list_add(&virt_to_page(below)->lru, empty);
		}
	}
	cond_resched();
}

void pt_tree_unlink_empty(struct pt_tree *tree, pteval_t zeros, struct list_head *empty)
{
	if (tree->order > PG_LEVEL_2M)
		__pt_tree_unlink_empty(tree, tree->root, tree->order, 0, zeros, empty);
}

void pt_tree_free_unlinked(struct pt_tree *tree, struct list_head *empty)
{
	struct page *page, *next;

	/* A thread may still use a table under RCU. */
	synchronize_rcu();
	list_for_each_entry_safe(page, next, empty, lru) {
		list_del(&page->lru);
		pt_tree_free_table(tree, page_address(page), PG_LEVEL_4K);
		cond_resched();
	}
}

/* Makes a tree for so many pages, without leaves. */
int pt_tree_init(struct pt_tree *tree, u64 pages, struct pt_source *source)
{
	unsigned int order = pt_order_for(pages);
	u64 page;

	if (!pages || order > PT_MAX_ORDER)
		return -EINVAL;
	pt_tree_begin(tree, order, pages, source);
	tree->root = pt_tree_alloc_table(tree, order);
	if (!tree->root)
		return -ENOMEM;

	for (page = 0; tree->order > PG_LEVEL_2M && page < pages;
	     page += pt_entry_pages(PG_LEVEL_1G)) {
		if (!pt_tree_make_table(tree, page, PG_LEVEL_2M) || fatal_signal_pending(current)) {
			pt_tree_destroy(tree);
			return -ENOMEM;
		}
		cond_resched();
	}
	return 0;
}
