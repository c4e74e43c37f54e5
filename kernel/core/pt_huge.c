// SPDX-License-Identifier: GPL-2.0
/* Leaves of 2 MiB: put, taken off, split. pt_huge.h lists their invariants. */

#include <linux/sched.h>

#include "core/compat.h"
#include "core/pt_flush.h"
#include "core/pt_huge.h"
#include "trace.h"

static pteval_t *pt_huge_deposit(struct pt_tree *tree, u64 page)
{
	return xa_load(&tree->deposits, page / PT_ENTRIES);
}

static unsigned long pt_huge_address(const struct pt_mount *mount, u64 page)
{
	return mount->start + (page << PAGE_SHIFT);
}

/* Keeps the table where it is found while a leaf is in its place. Once kept, it stays kept. */
static int pt_huge_keep(struct pt_tree *tree, u64 page, pteval_t *table)
{
	int error;

	if (pt_huge_deposit(tree, page))
		return 0;
	error = xa_insert(&tree->deposits, page / PT_ENTRIES, table, GFP_KERNEL);
	return error == -EBUSY ? 0 : error;
}

/* Returns the first entry that is not none; 0: all are none. */
static pteval_t pt_huge_first_entry(const pteval_t *table)
{
	unsigned int i;
	pteval_t value = 0;

	for (i = 0; i < PT_ENTRIES && !value; i++)
		value = READ_ONCE(table[i]);
	return value;
}

/*
 * The error for an entry that is not none. Another thread has claimed it for 2 MiB, or has not yet
 * opened all entries (EAGAIN); or it maps a page (EBUSY).
 */
static int pt_huge_refusal(pteval_t value)
{
	return value == PT_CLAIMED ? -EAGAIN : -EBUSY;
}

static void pt_huge_set_all(pteval_t *table, pteval_t value)
{
	unsigned int i;

	for (i = 0; i < PT_ENTRIES; i++)
		WRITE_ONCE(table[i], value);
}

static int pt_huge_put_locked(struct pt_mount *mount, pteval_t *entry, pteval_t *table, u64 page,
			      u64 frame)
{
	spinlock_t *lock;
	pteval_t old;

	/*
	 * Another thread has unmapped the surface. Another process may have mapped it since, and
	 * its faults are not kept out.
	 */
	if (READ_ONCE(mount->mm) != current->mm)
		return -EBUSY;
	old = pt_table_claim(table);
	if (old)
		return pt_huge_refusal(old);
	lock = pt_table_lock(entry);
	spin_lock(lock);
	xchg(entry, frame << PAGE_SHIFT | PT_HUGE_FLAGS);
	spin_unlock(lock);
	pt_mount_entry_changed(mount, page);
	atomic_long_inc(&mount->tree->huge);
	trace_huge_put(pt_huge_address(mount, page), frame);
	return 0;
}

int pt_huge_put(struct pt_mount *mount, u64 page, u64 frame)
{
	struct pt_tree *tree = mount->tree;
	pteval_t *entry = pt_tree_entry(tree, page);
	pteval_t *table, value;
	int error;

	if (!PT_HUGE_IS_POSSIBLE || !entry || (page | frame) % PT_ENTRIES ||
	    tree->pages < PT_ENTRIES || page > tree->pages - PT_ENTRIES)
		return -EINVAL;
	table = pt_tree_make_leaf(tree, page);
	value = READ_ONCE(*entry);
	if (!table && pt_entry_is_table(value))
		return -EAGAIN;
	if (!table)
		return value ? -EEXIST : -ENOMEM;
	/* Looks before it disturbs other threads. */
	value = pt_huge_first_entry(table);
	if (value)
		return pt_huge_refusal(value);
	error = pt_huge_keep(tree, page, table);
	if (error)
		return error;
	if (!pt_keep_faults_out(current->mm))
		return -EBUSY;
	error = pt_huge_put_locked(mount, entry, table, page, frame);
	pt_let_faults_in(current->mm);
	return error;
}

/*
 * Exchanges the leaf for its table, whose entries get this state. Returns the leaf; 0 if there is
 * none.
 */
static pteval_t pt_huge_exchange(struct pt_mount *mount, u64 page, pteval_t *table, pteval_t state)
{
	pteval_t *entry = pt_tree_entry(mount->tree, page);
	spinlock_t *lock = pt_table_lock(entry);
	pteval_t old;

	spin_lock(lock);
	old = READ_ONCE(*entry) & _PAGE_PSE ? READ_ONCE(*entry) : 0;
	if (old) {
		if (state != PT_CLAIMED)
			pt_huge_set_all(table, state);
		xchg(entry, pt_table_entry(table));
	}
	spin_unlock(lock);
	if (old) {
		pt_mount_entry_changed(mount, page);
		atomic_long_dec(&mount->tree->huge);
	}
	return old;
}

u64 pt_huge_take_off(struct pt_mount *mount, u64 page)
{
	pteval_t *table = pt_huge_deposit(mount->tree, page);
	pteval_t old = table ? pt_huge_exchange(mount, page, table, PT_CLAIMED) : 0;

	if (!old)
		return 0;
	trace_huge_take_off(pt_huge_address(mount, page), pt_leaf_pfn(old));
	return pt_leaf_pfn(old);
}

void pt_huge_open(struct pt_mount *mount, u64 page)
{
	pt_huge_set_all(pt_huge_deposit(mount->tree, page), 0);
}

/* Flushes the process of this thread, and the one that has the tree mounted by now. */
static void pt_huge_flush(struct pt_mount *mount, u64 page)
{
	pt_flush_huge(current->mm, pt_huge_address(mount, page));
	spin_lock(&mount->lock);
	if (unlikely(mount->attached && mount->mm != current->mm))
		pt_flush_huge(mount->mm, pt_huge_address(mount, page));
	spin_unlock(&mount->lock);
}

bool pt_huge_split(struct pt_mount *mount, u64 page, pteval_t flags)
{
	u64 first = round_down(page, PT_ENTRIES);
	pteval_t *table = pt_huge_deposit(mount->tree, first);
	pteval_t old = table ? pt_huge_exchange(mount, first, table, PT_SPLITTING) : 0;
	unsigned int i;

	if (!old)
		return false;
	pt_huge_flush(mount, first);
	for (i = 0; i < PT_ENTRIES; i++)
		WRITE_ONCE(table[i], (pt_leaf_pfn(old) + i) << PAGE_SHIFT | flags);
	atomic_long_inc(&mount->tree->splits);
	trace_huge_split(pt_huge_address(mount, first), pt_leaf_pfn(old));
	return true;
}

static bool pt_huge_is_claimed(const pteval_t *table)
{
	unsigned int i;

	for (i = 0; table && i < PT_ENTRIES; i++)
		if (READ_ONCE(table[i]) != PT_CLAIMED)
			return false;
	return table;
}

u64 pt_huge_wrong(struct pt_tree *tree)
{
	u64 page, found = 0, wrong = 0;

	for (page = 0; tree->root && page < tree->pages; page += PT_ENTRIES) {
		if (pt_tree_huge(tree, page)) {
			found++;
			wrong += !pt_huge_is_claimed(pt_huge_deposit(tree, page));
		}
		cond_resched();
	}
	return wrong + (found != atomic_long_read(&tree->huge));
}
