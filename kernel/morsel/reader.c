// SPDX-License-Identifier: GPL-2.0
/*
 * A second tree whose leaves show the same pages and cannot be written through.
 *
 * For CPUs an entry above without the right to write would be enough. It is not enough for the
 * core, which reads leaves alone when it pins pages and when the host of a virtual machine asks for
 * them. So a mapping that may not write mounts this tree. It is made for the first such mapping.
 * When a reader misses a page, it gets all leaves of that page's table, once for all readers.
 *
 * A leaf of this tree changes under the lock of the other tree's table, so it is gone before the
 * page is. A leaf of 2 MiB changes under the mutex `tables`.
 */

#include <linux/mm.h>
#include <linux/slab.h>

#include "morsel/morsel.h"

/* A reader's leaf is not dirty: without the right to write, dirty means something else to CPUs. */
#define MORSEL_READER_LACKS	(_PAGE_RW | _PAGE_DIRTY)

/*
 * Bits that other code changes. Code that looks which pages were accessed clears the first. The
 * core sets the second when a write has faulted and finds the page there.
 */
#define MORSEL_READER_OTHERS		(_PAGE_ACCESSED | _PAGE_SOFT_DIRTY)

/* For pages of 256 MiB. */
#define MORSEL_TABLES_AT_ONCE	128

static struct pt_tree *morsel_reader_of(struct morsel *morsel)
{
	/* Pairs with the release in __morsel_make_reader(). */
	return smp_load_acquire(&morsel->reader);
}

static int __morsel_make_reader(struct morsel *morsel)
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
	/* Pairs with the acquire in morsel_reader_of(). */
	smp_store_release(&morsel->reader, reader);
	return 0;
no_tree:
	morsel_uncharge(morsel, 1);
no_room:
	kfree(reader);
	return error;
}

/*
 * Makes a table of the reader's tree where the other tree has a table, which stays; or a leaf of 2
 * MiB.
 */
int morsel_make_readers_room(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = morsel_reader_of(morsel);
	pteval_t huge = pt_tree_huge(&morsel->tree, page);
	pteval_t *made;

	lockdep_assert_held(&morsel->tables);
	if (!huge && !pt_tree_leaf(&morsel->tree, page))
		return 0;
	made = huge ? pt_tree_make_entry(reader, page) : pt_tree_make_leaf(reader, page);
	if (made && huge)
		xchg(made, huge & ~MORSEL_READER_LACKS);
	return made ? 0 : -ENOMEM;
}

static int morsel_make_room_for_reader(struct morsel *morsel, u64 page)
{
	return morsel_make_room(morsel, morsel_reader_of(morsel), page);
}

/* Shows readers all pages in the page's table, or the page's 2 MiB. */
int morsel_show_reader(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = morsel_reader_of(morsel);
	u64 first = round_down(page, PT_ENTRIES);
	pteval_t *from = pt_tree_leaf(&morsel->tree, first), *to = pt_tree_leaf(reader, first);
	spinlock_t *lock;
	unsigned int i;

	if (!from || !to) {
		int error = morsel_charging(morsel, first, morsel_make_room_for_reader);

		if (error)
			return error;
		from = pt_tree_leaf(&morsel->tree, first);
		to = pt_tree_leaf(reader, first);
	}
	/*
	 * A leaf of 2 MiB; or the entry has just changed, and a thread that misses the page faults
	 * again.
	 */
	if (!from || !to)
		return 0;
	lock = pt_table_lock(from);
	spin_lock(lock);
	for (i = 0; i < PT_ENTRIES; i++)
		WRITE_ONCE(to[i], READ_ONCE(from[i]) & ~MORSEL_READER_LACKS);
	spin_unlock(lock);
	return 0;
}

/*
 * Shows the pages that are there when the first reader comes, as far as that takes little time.
 * Readers need no fault for these.
 */
static void morsel_show_first_reader(struct morsel *morsel)
{
	u64 end = min_t(u64, morsel_page_count(morsel), MORSEL_TABLES_AT_ONCE * PT_ENTRIES);
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
	error = is_first ? __morsel_make_reader(morsel) : 0;
	mutex_unlock(&morsel->tables);
	if (is_first && !error)
		morsel_show_first_reader(morsel);
	return error;
}

/* Hides a page that goes. The lock of its table is held. */
void morsel_hide_from_reader(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = morsel_reader_of(morsel);
	pteval_t *leaf = reader ? pt_tree_leaf(reader, page) : NULL;
	spinlock_t *lock;

	if (!leaf)
		return;
	lock = pt_table_lock(leaf);
	spin_lock_nested(lock, SINGLE_DEPTH_NESTING);
	xchg(leaf, 0);
	spin_unlock(lock);
}

/* Hides a leaf of 2 MiB that goes, or becomes a table. The mutex `tables` is held. */
void morsel_hide_block(struct morsel *morsel, u64 page)
{
	struct pt_tree *reader = morsel_reader_of(morsel);
	pteval_t *entry = reader && pt_tree_huge(reader, page) ? pt_tree_entry(reader, page) : NULL;

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

struct morsel_comparison {
	struct morsel	*morsel;
	u64		wrong;
};

static void morsel_reader_compare(void *data, u64 page, pteval_t leaf)
{
	struct morsel_comparison *comparison = data;
	struct pt_tree *tree = &comparison->morsel->tree;
	pteval_t *other = pt_tree_leaf(tree, page);
	pteval_t value = other ? READ_ONCE(*other) : pt_huge_part(pt_tree_huge(tree, page), page);

	comparison->wrong += ((value ^ leaf) & ~(MORSEL_READER_LACKS | MORSEL_READER_OTHERS)) != 0;
}

/* For self-checks, while nothing changes: counts leaves that show a wrong page. */
u64 morsel_reader_wrong(struct morsel *morsel)
{
	struct morsel_comparison comparison = { .morsel = morsel };

	if (morsel_reader_of(morsel))
		pt_tree_each_leaf(morsel->reader, morsel_reader_compare, &comparison);
	return comparison.wrong;
}
