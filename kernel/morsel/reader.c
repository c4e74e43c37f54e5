// SPDX-License-Identifier: GPL-2.0
/*
 * A second tree whose leaves show the same pages and cannot be written through.
 *
 * Processors would be content with an entry above that lacks the right to write. The core is not: it
 * looks at leaves alone, when it pins pages and when a virtual machine's host asks it for them. So
 * who may not write mounts this tree. It is made when the first one comes, and shows what a table of
 * the other one has when somebody misses a page of it: once for all readers.
 *
 * A leaf here is changed under the lock of the other tree's table, so that it is gone before the
 * page is; one of 2 MiB under the mutex `tables`.
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

/* For pages of 256 MiB. */
#define TABLES_AT_ONCE	128

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

/* Where the other tree has a table, which it has for good, the reader's gets one; or 2 MiB. */
int morsel_make_readers_room(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = reader_of(morsel);
	u64 huge = pt_tree_huge(&morsel->tree, page);
	u64 *made;

	lockdep_assert_held(&morsel->tables);
	if (!huge && !pt_tree_leaf(&morsel->tree, page))
		return 0;
	made = huge ? pt_tree_make_entry(reader, page) : pt_tree_make_leaf(reader, page);
	if (made && huge)
		xchg(made, huge & ~READER_LACKS);
	return made ? 0 : -ENOMEM;
}

static int make_room(struct morsel *morsel, u64 page)
{
	return morsel_make_room(morsel, reader_of(morsel), page);
}

/* Shows all pages that are in one table with this one, or in 2 MiB. */
int morsel_show_reader(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = reader_of(morsel);
	u64 first = round_down(page, PT_ENTRIES);
	u64 *from = pt_tree_leaf(&morsel->tree, first), *to = pt_tree_leaf(reader, first);
	spinlock_t *lock;
	unsigned int i;

	if (!from || !to) {
		int error = morsel_charging(morsel, first, make_room);

		if (error)
			return error;
		from = pt_tree_leaf(&morsel->tree, first);
		to = pt_tree_leaf(reader, first);
	}
	/* 2 MiB; or what just changed from that or to it, which whoever misses it asks for again. */
	if (!from || !to)
		return 0;
	lock = pt_table_lock(from);
	spin_lock(lock);
	for (i = 0; i < PT_ENTRIES; i++)
		WRITE_ONCE(to[i], READ_ONCE(from[i]) & ~READER_LACKS);
	spin_unlock(lock);
	return 0;
}

/*
 * What is there when the first reader comes is shown at once, as far as that takes no time worth
 * mentioning: he and those after him need no fault for it.
 */
static void show_first(struct morsel *morsel)
{
	u64 end = min_t(u64, morsel_page_count(morsel), TABLES_AT_ONCE * PT_ENTRIES);
	u64 page;

	for (page = 0; page < end; page += PT_ENTRIES)
		if ((pt_tree_leaf(&morsel->tree, page) || pt_tree_huge(&morsel->tree, page)) &&
		    morsel_show_reader(morsel, page))
			return;
}

int morsel_make_reader(struct morsel *morsel)
{
	bool is_first;
	int error;

	mutex_lock(&morsel->tables);
	is_first = !morsel->reader;
	error = is_first ? make(morsel) : 0;
	mutex_unlock(&morsel->tables);
	if (is_first && !error)
		show_first(morsel);
	return error;
}

/* A page goes. The lock of its table is held. */
void morsel_hide_from_reader(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = reader_of(morsel);
	u64 *leaf = reader ? pt_tree_leaf(reader, page) : NULL;
	spinlock_t *lock;

	if (!leaf)
		return;
	lock = pt_table_lock(leaf);
	spin_lock_nested(lock, SINGLE_DEPTH_NESTING);
	xchg(leaf, 0);
	spin_unlock(lock);
}

/* 2 MiB go, or become a table. The mutex `tables` is held. */
void morsel_hide_block(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = reader_of(morsel);
	u64 *entry = reader && pt_tree_huge(reader, page) ? pt_tree_entry(reader, page) : NULL;

	if (entry)
		morsel_clear_entry(entry);
}

void morsel_destroy_reader(struct morsel *morsel)
{
	u64 tables;

	if (!morsel->reader)
		return;
	tables = atomic_long_read(&morsel->reader->tables);
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
