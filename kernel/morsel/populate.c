// SPDX-License-Identifier: GPL-2.0
/* Pages come, zeroed: one by one, or 2 MiB at a time. */

#include <linux/libnvdimm.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>

#include "core/pt_flush.h"
#include "morsel/morsel.h"

/*
 * For pages of data, which are charged to the thread that populates. The core knows nothing of
 * these pages, so it cannot move them. They are up to date, as a pipe expects of a page that it
 * gets.
 */
#define MORSEL_PAGE_GFP	(GFP_KERNEL_ACCOUNT | __GFP_ZERO)
/* 2 MiB in a row are welcome, but not worth much work. */
#define MORSEL_BLOCK_GFP	(MORSEL_PAGE_GFP | __GFP_NOWARN | __GFP_NORETRY)
#define MORSEL_BLOCK_ORDER	9

static int morsel_may_populate(struct morsel *morsel, u64 page)
{
	if (READ_ONCE(morsel->is_revoked))
		return -EIO;
	if (page >= morsel_page_count(morsel))
		return -EFAULT;
	return READ_ONCE(morsel->seals) & VELLUM_MORSEL_SEAL_POPULATION ? -EPERM : 0;
}

static struct page *morsel_new_page(struct morsel *morsel)
{
	struct page *page;

	if (morsel->device)
		return morsel_device_take(morsel->device);
	page = alloc_page(MORSEL_PAGE_GFP);
	if (page)
		SetPageUptodate(page);
	return page;
}

void morsel_free_page(struct morsel *morsel, struct page *page)
{
	if (morsel->device)
		morsel_device_give(morsel->device, page);
	else
		put_page(page);
}

void morsel_persist_entry(struct morsel *morsel, const pteval_t *entry)
{
	if (morsel->device)
		morsel_persist(entry, sizeof(*entry));
}

/* Makes the entries that lead to the page durable, its own included. */
static void morsel_persist_path(struct morsel *morsel, u64 page)
{
	pteval_t *table = morsel->tree.root, *entry;
	unsigned int level;

	for (level = morsel->tree.order; level; level--) {
		entry = table + (page / pt_entry_pages(level)) % PT_ENTRIES;
		arch_wb_cache_pmem(entry, sizeof(*entry));
		table = pt_entry_table(*entry);
	}
	pmem_wmb();
}

/*
 * Puts a leaf on a device: see device.h. Without PRESENT the core takes the leaf for that of a page
 * that no access is allowed to, and a fault makes it accessible. The core does that under the lock.
 */
static bool morsel_put_durable_leaf(struct morsel *morsel, u64 page, pteval_t *leaf, pteval_t value)
{
	spinlock_t *lock = pt_table_lock(leaf);
	bool is_none;

	spin_lock(lock);
	is_none = !READ_ONCE(*leaf);
	if (is_none) {
		WRITE_ONCE(*leaf, (value & ~_PAGE_PRESENT) | _PAGE_PROTNONE);
		morsel_persist_path(morsel, page);
		xchg(leaf, value);
	}
	spin_unlock(lock);
	return is_none;
}

/*
 * Puts a leaf for a number of pages where the entry is none. Revocation and seals wait until no CPU
 * is between the look and the leaf: see morsel_end_population(). EEXIST: the entry is not none.
 */
static int morsel_put_leaf(struct morsel *morsel, u64 page, pteval_t *entry, pteval_t value,
			   u64 count)
{
	pteval_t none = 0;
	int error;

	rcu_read_lock();
	error = morsel_may_populate(morsel, page);
	if (!error) {
		/* The pages count before another thread can take them off. */
		atomic64_add(count, &morsel->pages);
		if (!(morsel->device ? morsel_put_durable_leaf(morsel, page, entry, value) :
				       try_cmpxchg(entry, &none, value))) {
			atomic64_sub(count, &morsel->pages);
			error = -EEXIST;
		}
	}
	rcu_read_unlock();
	return error;
}

/* Puts a page where the leaf is none. If another thread's page comes first, that one is as good. */
static int morsel_put_page(struct morsel *morsel, u64 page, pteval_t *leaf)
{
	struct page *fresh;
	int error = -ENOMEM;

	if (!morsel_charge(morsel, 1))
		return -ENOSPC;
	fresh = morsel_new_page(morsel);
	if (fresh)
		error = morsel_put_leaf(morsel, page, leaf,
					page_to_phys(fresh) | morsel->leaf_flags, 1);
	if (!error)
		return 0;
	morsel_uncharge(morsel, 1);
	if (fresh)
		morsel_free_page(morsel, fresh);
	return error == -EEXIST ? 0 : error;
}

/* Whether a leaf of 2 MiB may come to the entry above the page; notes that one has. */
static bool morsel_is_first_block(struct morsel *morsel, u64 page)
{
	return PT_HUGE_MAY_RETURN ||
	       !xa_insert(&morsel->blocks, page / PT_ENTRIES, xa_mk_value(0), GFP_KERNEL);
}

/*
 * Puts a leaf of 2 MiB where the entry is none. False: the kernel has no 2 MiB in a row, or no page
 * may come any more.
 */
static bool morsel_put_block(struct morsel *morsel, u64 page, pteval_t *entry)
{
	struct page *block;
	unsigned int i;
	int error;

	if (!morsel_charge(morsel, PT_ENTRIES))
		return false;
	block = alloc_pages(MORSEL_BLOCK_GFP, MORSEL_BLOCK_ORDER);
	if (block && !morsel_is_first_block(morsel, page)) {
		__free_pages(block, MORSEL_BLOCK_ORDER);
		block = NULL;
	}
	if (!block) {
		morsel_uncharge(morsel, PT_ENTRIES);
		return false;
	}
	/* The pages are freed one by one. */
	split_page(block, MORSEL_BLOCK_ORDER);
	for (i = 0; i < PT_ENTRIES; i++)
		SetPageUptodate(block + i);
	error = morsel_put_leaf(morsel, page, entry, page_to_phys(block) | PT_HUGE_FLAGS,
				PT_ENTRIES);
	if (error) {
		for (i = 0; i < PT_ENTRIES; i++)
			put_page(block + i);
		morsel_uncharge(morsel, PT_ENTRIES);
		return false;
	}
	atomic_long_inc(&morsel->tree.huge);
	return true;
}

static bool morsel_may_have_block(const struct morsel *morsel, u64 page)
{
	return (morsel->flags & VELLUM_MORSEL_HUGE) &&
	       round_down(page, PT_ENTRIES) + PT_ENTRIES <= morsel_page_count(morsel);
}

/* The caller holds the mutex `tables`. */
static int __morsel_make_room(struct morsel *morsel, struct pt_tree *tree, u64 page)
{
	pteval_t *entry;

	if (tree != &morsel->tree)
		return morsel_make_readers_room(morsel, page);
	if (morsel_may_have_block(morsel, page)) {
		entry = pt_tree_make_entry(tree, page);
		if (!entry)
			return -ENOMEM;
		if (*entry || morsel_put_block(morsel, page, entry))
			return 0;
	}
	return pt_tree_make_leaf(tree, page) ? 0 : -ENOMEM;
}

int morsel_make_room(struct morsel *morsel, struct pt_tree *tree, u64 page)
{
	long missing, made = 0;
	u64 guarded;
	int error;

	mutex_lock(&morsel->tables);
	missing = pt_tree_missing(tree, page);
	error = morsel_charge(morsel, missing) ? 0 : -ENOSPC;
	if (!error) {
		guarded = pt_tree_guarded(tree, page);
		made = -atomic_long_read(&tree->tables);
		error = __morsel_make_room(morsel, tree, page);
		made += atomic_long_read(&tree->tables);
		if (guarded != pt_tree_guarded(tree, page))
			pt_mounts_flush_tables(&morsel->mounts, round_down(page, guarded), guarded);
		morsel_uncharge(morsel, missing - made);
	}
	mutex_unlock(&morsel->tables);
	return error;
}

static int __morsel_populate(struct morsel *morsel, u64 page)
{
	pteval_t *leaf = pt_tree_leaf(&morsel->tree, page);
	int error;

	if (!leaf) {
		error = morsel_make_room(morsel, &morsel->tree, page);
		if (error)
			return error;
		leaf = pt_tree_leaf(&morsel->tree, page);
	}
	/* Without a leaf of its own the page is in 2 MiB that came, or that just went again. */
	return leaf && !morsel_is_shown(READ_ONCE(*leaf)) ? morsel_put_page(morsel, page, leaf) : 0;
}

static bool morsel_is_there(struct morsel *morsel, u64 page)
{
	pteval_t *leaf = pt_tree_leaf(&morsel->tree, page);

	return leaf ? morsel_is_shown(READ_ONCE(*leaf)) : pt_tree_huge(&morsel->tree, page);
}

/*
 * Whether the page was missed only while a leaf of 2 MiB became a table. Callers are not to notice
 * that.
 */
static bool morsel_is_there_after_all(struct morsel *morsel, u64 page)
{
	bool is_so;

	mutex_lock(&morsel->tables);
	is_so = morsel_is_there(morsel, page);
	mutex_unlock(&morsel->tables);
	return is_so;
}

int morsel_populate(struct morsel *morsel, u64 page)
{
	int error;

	if (morsel_is_there(morsel, page))
		return 0;
	error = morsel_may_populate(morsel, page);
	if (!error)
		error = morsel_charging(morsel, page, __morsel_populate);
	return error && morsel_is_there_after_all(morsel, page) ? 0 : error;
}

int morsel_populate_range(struct morsel *morsel, u64 first, u64 count)
{
	int error = 0;

	for (; !error && count; first++, count--) {
		error = morsel_populate(morsel, first);
		if (!(first % PT_ENTRIES)) {
			cond_resched();
			if (signal_pending(current))
				error = error ?: -EINTR;
		}
	}
	return error;
}

struct page *morsel_get_page(struct morsel *morsel, u64 page)
{
	pteval_t *leaf = pt_tree_leaf(&morsel->tree, page);
	struct page *found = NULL;
	spinlock_t *lock;
	pteval_t value;

	if (!leaf) {
		/* There is no page, or a leaf of 2 MiB, which may just be on its way to a table. */
		mutex_lock(&morsel->tables);
		value = pt_tree_huge(&morsel->tree, page);
		if (value) {
			found = pfn_to_page(pt_leaf_pfn(value) + page % PT_ENTRIES);
			get_page(found);
		}
		leaf = value ? NULL : pt_tree_leaf(&morsel->tree, page);
		mutex_unlock(&morsel->tables);
	}
	if (!leaf)
		return found;
	lock = pt_table_lock(leaf);
	spin_lock(lock);
	value = READ_ONCE(*leaf);
	if (value) {
		found = pfn_to_page(pt_leaf_pfn(value));
		get_page(found);
	}
	spin_unlock(lock);
	return found;
}
