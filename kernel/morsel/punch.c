// SPDX-License-Identifier: GPL-2.0
/*
 * Pages go. Leaves are cleared, TLBs are flushed for all processes that have the Morsel mounted,
 * and then the pages are free. A page that something else has a reference to lives on outside the
 * Morsel. Secondary MMUs, which have no reference, are told. Where they cannot be told, the core
 * unmaps the range, which tells them, and detaches all mounts until the next access.
 */

#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "core/pt_flush.h"
#include "morsel/morsel.h"

/* The number of pages that wait for the same flush. */
#define MORSEL_PUNCH_BATCH	512

struct morsel_departure {
	struct morsel	*morsel;
	struct page	**pages;
	unsigned int	count;
	u64		first, last;	/* the range that the pages are in */
};

static void morsel_punch_flush(struct morsel_departure *departure)
{
	struct morsel *morsel = departure->morsel;
	unsigned int i;
	u64 count;

	if (!departure->count)
		return;
	count = departure->last - departure->first + 1;
	pt_mounts_flush(&morsel->mounts, departure->first, count);
	if (!pt_mounts_tell_secondary(&morsel->mounts, departure->first, count))
		unmap_mapping_range(morsel->inode.i_mapping, departure->first << PAGE_SHIFT,
				    count << PAGE_SHIFT, 1);
	for (i = 0; i < departure->count; i++)
		morsel_free_page(morsel, departure->pages[i]);
	atomic64_sub(departure->count, &morsel->pages);
	morsel_uncharge(morsel, departure->count);
	departure->count = 0;
}

static void morsel_punch_add(struct morsel_departure *departure, u64 page, u64 pfn)
{
	if (!departure->count)
		departure->first = page;
	departure->last = page;
	departure->pages[departure->count++] = pfn_to_page(pfn);
	if (departure->count == MORSEL_PUNCH_BATCH)
		morsel_punch_flush(departure);
}

static void morsel_take_off(struct morsel_departure *departure, pteval_t *leaf, u64 page)
{
	spinlock_t *lock = pt_table_lock(leaf);
	pteval_t old;

	/*
	 * The core's fault handler writes entries back under this lock as it has read them. A
	 * thread that needs the page takes its reference under it.
	 */
	spin_lock(lock);
	old = xchg(leaf, 0);
	if (old) {
		morsel_persist_entry(departure->morsel, leaf);
		morsel_hide_from_reader(departure->morsel, page);
	}
	spin_unlock(lock);
	if (old)
		morsel_punch_add(departure, page, pt_leaf_pfn(old));
}

static pteval_t morsel_clear_huge_entry(struct morsel *morsel, pteval_t *entry, u64 page)
{
	pteval_t old = morsel_clear_entry(entry);

	morsel_hide_block(morsel, page);
	atomic_long_dec(&morsel->tree.huge);
	return old;
}

/* Takes a leaf of 2 MiB off. The mutex `tables` is held. */
static void morsel_take_off_block(struct morsel_departure *departure, pteval_t *entry, u64 page)
{
	pteval_t old = morsel_clear_huge_entry(departure->morsel, entry, page);
	u64 i;

	for (i = 0; i < PT_ENTRIES; i++)
		morsel_punch_add(departure, page + i, pt_leaf_pfn(old) + i);
}

/*
 * Splits a leaf of 2 MiB into 512. The mutex `tables` is held. In between nothing is mapped there.
 */
static int morsel_split_block(struct morsel *morsel, pteval_t *entry, u64 page)
{
	pteval_t *table, old;
	unsigned int i;

	if (!morsel_charge(morsel, 1))
		return -ENOSPC;
	table = pt_table_alloc(PG_LEVEL_4K);
	if (!table) {
		morsel_uncharge(morsel, 1);
		return -ENOMEM;
	}
	old = morsel_clear_huge_entry(morsel, entry, page);
	pt_mounts_flush(&morsel->mounts, round_down(page, PT_ENTRIES), PT_ENTRIES);
	for (i = 0; i < PT_ENTRIES; i++)
		table[i] = (pt_leaf_pfn(old) + i) << PAGE_SHIFT | morsel->leaf_flags;
	/* A full barrier: the leaves are there before a CPU can walk to them. */
	xchg(entry, pt_table_entry(table));
	atomic_long_inc(&morsel->tree.tables);
	atomic_long_inc(&morsel->tree.splits);
	return 0;
}

/*
 * Punches a leaf of 2 MiB that the page is in: takes it off if all of it is in the range, or else
 * splits it.
 */
static int morsel_punch_block(struct morsel_departure *departure, u64 page, u64 end)
{
	struct morsel *morsel = departure->morsel;
	pteval_t *entry;
	int error = 0;

	mutex_lock(&morsel->tables);
	if (pt_tree_huge(&morsel->tree, page)) {
		entry = pt_tree_entry(&morsel->tree, page);
		if (!(page % PT_ENTRIES) && end - page >= PT_ENTRIES)
			morsel_take_off_block(departure, entry, page);
		else
			error = morsel_split_block(morsel, entry, page);
	}
	mutex_unlock(&morsel->tables);
	return error;
}

/* The first page whose leaf is in the next table. */
static u64 morsel_next_table(u64 page)
{
	return round_down(page, PT_ENTRIES) + PT_ENTRIES;
}

/*
 * The first page under the next entry of level 2, or under the next higher entry with a guard. A
 * table may replace that guard at any time.
 */
static u64 morsel_next_part(struct morsel *morsel, u64 page)
{
	u64 part = pt_tree_guarded(&morsel->tree, page) ?: PT_ENTRIES;

	return round_down(page, part) + part;
}

static int __morsel_punch(struct morsel_departure *departure, u64 page, u64 end)
{
	struct morsel *morsel = departure->morsel;
	pteval_t *leaf;
	int error;
	u64 stop;

	for (; page < end; page = stop) {
		cond_resched();
		leaf = pt_tree_leaf(&morsel->tree, page);
		/* Nothing is there, or a leaf of 2 MiB, which may just be on its way to a table. */
		if (!leaf && morsel->flags & VELLUM_MORSEL_HUGE) {
			error = morsel_punch_block(departure, page, end);
			if (error)
				return error;
			leaf = pt_tree_leaf(&morsel->tree, page);
		}
		stop = min(leaf ? morsel_next_table(page) : morsel_next_part(morsel, page), end);
		for (; leaf && page < stop; page++, leaf++)
			if (READ_ONCE(*leaf))
				morsel_take_off(departure, leaf, page);
	}
	return 0;
}

/*
 * Punches the page of order 0, which entries of the processes map: see morsel_map_single(). The
 * wait for the page comes after the mutex was released, as a holder of a reference may want the
 * mutex.
 */
static int morsel_punch_single(struct morsel_departure *departure, u64 page, u64 end)
{
	struct morsel *morsel = departure->morsel;
	int error;

	mutex_lock(&morsel->tables);
	error = __morsel_punch(departure, page, end);
	if (departure->count)
		unmap_mapping_range(morsel->inode.i_mapping, 0, 0, 1);
	mutex_unlock(&morsel->tables);
	return error;
}

/* Punches the pages from `first` to before `end`. */
int morsel_punch_pages(struct morsel *morsel, u64 first, u64 end)
{
	struct morsel_departure departure = { .morsel = morsel };
	int error;

	departure.pages = kcalloc(MORSEL_PUNCH_BATCH, sizeof(*departure.pages), GFP_KERNEL_ACCOUNT);
	if (!departure.pages)
		return -ENOMEM;
	error = morsel->order ? __morsel_punch(&departure, first, end) :
				morsel_punch_single(&departure, first, end);
	morsel_punch_flush(&departure);
	kfree(departure.pages);
	return error;
}

/* Zeroes bytes within a page. */
static void morsel_zero(struct morsel *morsel, u64 offset, u64 end)
{
	struct page *page;

	if (offset == end)
		return;
	page = morsel_get_page(morsel, offset >> PAGE_SHIFT);
	if (!page)
		return;
	memset(page_address(page) + offset_in_page(offset), 0, end - offset);
	put_page(page);
}

int morsel_punch(struct morsel *morsel, u64 offset, u64 length)
{
	u64 end = min(offset + length, morsel->length);
	u64 first, last;

	if (offset >= end)
		return 0;
	first = round_up(offset, PAGE_SIZE);
	/* The last page ends with the Morsel. */
	last = end == morsel->length ? round_up(end, PAGE_SIZE) : round_down(end, PAGE_SIZE);
	if (first > last) {
		morsel_zero(morsel, offset, end);
		return 0;
	}
	morsel_zero(morsel, offset, first);
	morsel_zero(morsel, min(last, end), end);
	return morsel_punch_pages(morsel, first >> PAGE_SHIFT, last >> PAGE_SHIFT);
}
