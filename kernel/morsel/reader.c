// SPDX-License-Identifier: GPL-2.0
/*
 * A second tree whose leaves show the same pages and cannot be written through.
 *
 * The right to write is taken away in the entry that mounts a tree, at no cost. That is not enough
 * in two cases: an entry of level 1 must have it, or the core takes it for a damaged one; and where
 * pages may be pinned, the core's fast way to them looks at leaves alone. There a reader mounts this
 * tree. It is made when the first one comes, and shows what a table of the other one has when
 * somebody misses a page of it.
 *
 * A leaf here is changed under the lock of the other tree's table, so that it is gone before the
 * page is.
 *
 * An entry of level 4 must have the right, too. There a second root is enough: the entries in it
 * lack the right, and lead to the same tables.
 */

#include <linux/mm.h>
#include <linux/slab.h>

#include "morsel/morsel.h"

/* Not dirty, as that without the right to write means something else to processors. */
#define READER_LACKS	((u64)(_PAGE_RW | _PAGE_DIRTY))

/*
 * What others change: who looks which pages were accessed clears that, and the core, when a write
 * has faulted and finds the page there, notes it twice.
 */
#define OTHERS		((u64)(_PAGE_ACCESSED | _PAGE_SOFT_DIRTY))

bool morsel_needs_reader(const struct morsel *morsel)
{
	return morsel->order == 1 || morsel->order == 4 ||
	       (morsel->order && (morsel->flags & VELLUM_MORSEL_PINNABLE));
}

/* Whether its reader is but a root. */
static bool is_shallow(const struct morsel *morsel)
{
	return morsel->order == 4 && !(morsel->flags & VELLUM_MORSEL_PINNABLE);
}

static struct pt_tree *reader_of(struct morsel *morsel)
{
	/* Pairs with the release when it was made. */
	return smp_load_acquire(&morsel->reader);
}

static int make(struct morsel *morsel)
{
	struct pt_tree *reader = kzalloc(sizeof(*reader), GFP_KERNEL_ACCOUNT);
	int error;

	if (!reader)
		return -ENOMEM;
	error = morsel_charge(morsel, 1) ? 0 : -ENOSPC;
	if (error)
		goto no_room;
	error = pt_tree_init_sparse(reader, morsel->order, NULL);
	if (error)
		goto no_tree;
	smp_store_release(&morsel->reader, reader);
	return 0;
no_tree:
	morsel_uncharge(morsel, 1);
no_room:
	kfree(reader);
	return error;
}

int morsel_make_reader(struct morsel *morsel)
{
	int error;

	mutex_lock(&morsel->tables);
	error = morsel->reader ? 0 : make(morsel);
	mutex_unlock(&morsel->tables);
	return error;
}

/* Shows the table of level 3 that the page is below. */
static void show_shallow(struct morsel *morsel, struct pt_tree *reader, u64 page)
{
	u64 count = pt_entry_pages(4), entry;

	mutex_lock(&morsel->tables);
	entry = READ_ONCE(morsel->tree.root[page / count]) & ~(u64)_PAGE_RW;
	if (pt_entry_table(entry) != pt_entry_table(reader->root[page / count])) {
		WRITE_ONCE(reader->root[page / count], entry);
		/* Processors may still know the guard. */
		pt_mounts_flush_tables(&morsel->mounts, round_down(page, count), count);
	}
	mutex_unlock(&morsel->tables);
}

/* Shows all pages that are in one table with this one. */
static int show_leaves(struct morsel *morsel, struct pt_tree *reader, u64 page)
{
	u64 first = round_down(page, PT_ENTRIES);
	u64 *from = pt_tree_leaf(&morsel->tree, first), *to;
	spinlock_t *lock;
	unsigned int i;
	int error;

	if (!from)
		return 0;
	if (!pt_tree_leaf(reader, first)) {
		error = morsel_make_room(morsel, reader, first);
		if (error)
			return error;
	}
	to = pt_tree_leaf(reader, first);
	lock = pt_table_lock(from);
	spin_lock(lock);
	for (i = 0; i < PT_ENTRIES; i++)
		WRITE_ONCE(to[i], READ_ONCE(from[i]) & ~READER_LACKS);
	spin_unlock(lock);
	return 0;
}

int morsel_show_reader(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = reader_of(morsel);

	if (!is_shallow(morsel))
		return show_leaves(morsel, reader, page);
	show_shallow(morsel, reader, page);
	return 0;
}

/* A page goes. The lock of its table is held. */
void morsel_hide_from_reader(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = reader_of(morsel);
	u64 *leaf = reader && !is_shallow(morsel) ? pt_tree_leaf(reader, page) : NULL;
	spinlock_t *lock;

	if (!leaf)
		return;
	lock = pt_table_lock(leaf);
	spin_lock_nested(lock, SINGLE_DEPTH_NESTING);
	xchg(leaf, 0);
	spin_unlock(lock);
}

void morsel_destroy_reader(struct morsel *morsel)
{
	u64 tables;

	if (!morsel->reader)
		return;
	tables = atomic_long_read(&morsel->reader->tables);
	if (is_shallow(morsel))
		pt_tree_forget(morsel->reader);
	pt_tree_destroy(morsel->reader);
	morsel_uncharge(morsel, tables);
	kfree(morsel->reader);
	morsel->reader = NULL;
}

struct comparison {
	struct morsel	*morsel;
	u64		wrong;
};

static void compare(void *data, u64 page, u64 leaf)
{
	struct comparison *comparison = data;
	struct pt_tree *tree = &comparison->morsel->tree;
	u64 *other = pt_tree_leaf(tree, page);
	u64 value = other ? READ_ONCE(*other) : pt_huge_part(pt_tree_huge(tree, page), page);

	comparison->wrong += ((value ^ leaf) & ~(READER_LACKS | OTHERS)) != 0;
}

/* For self-checks, while nothing changes: leaves that show another page than they should. */
u64 morsel_reader_wrong(struct morsel *morsel)
{
	struct comparison comparison = { .morsel = morsel };

	if (reader_of(morsel))
		pt_tree_each_leaf(morsel->reader, compare, &comparison);
	return comparison.wrong;
}
