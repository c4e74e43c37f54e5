// SPDX-License-Identifier: GPL-2.0
/*
 * Making durable what CPUs have stored through a table.
 *
 * The CPU that stores to a page sets the dirty bit of its leaf, for all processes at once, and
 * without a fault. Sync clears the bits, flushes the TLBs, because a CPU that has cached a dirty
 * leaf does not set the bit again, and then writes the pages back from the CPUs' caches. The paper
 * has faults instead, and notes 2 MiB at a time (section IV.D).
 */

#include <linux/libnvdimm.h>
#include <linux/mm.h>
#include <linux/mount.h>
#include <linux/sched.h>

#include "dax/dax.h"

/* Pages whose TLB entries are flushed together. */
#define DAX_SYNC_PAGES	(64 * PT_ENTRIES)

struct dax_dirty {
	DECLARE_BITMAP(pages, DAX_SYNC_PAGES);
};

/* Clears the dirty bits of up to DAX_SYNC_PAGES pages, and notes the pages. True: some were set. */
static bool dax_collect(struct dax_table *table, u64 first, u64 end, struct dax_dirty *dirty)
{
	bool has_some = false;
	pteval_t *leaf;
	u64 page;

	down_read(&table->shape);
	for (page = first; page < end; page++) {
		leaf = pt_tree_leaf(&table->tree, page);
		if (!leaf) {
			page = round_down(page, PT_ENTRIES) + PT_ENTRIES - 1;
		} else if ((READ_ONCE(*leaf) & _PAGE_DIRTY) &&
			   test_and_clear_bit(_PAGE_BIT_DIRTY, (unsigned long *)leaf)) {
			__set_bit(page - first, dirty->pages);
			has_some = true;
		}
	}
	up_read(&table->shape);
	return has_some;
}

static void dax_write_back(struct dax_table *table, u64 first, const struct dax_dirty *dirty)
{
	unsigned long i;
	pteval_t *leaf, value;

	down_read(&table->shape);
	for_each_set_bit(i, dirty->pages, DAX_SYNC_PAGES) {
		leaf = pt_tree_leaf(&table->tree, first + i);
		value = leaf ? READ_ONCE(*leaf) : 0;
		/* The block may be another file's by now. Writing it back changes nothing. */
		if (value)
			arch_wb_cache_pmem(__va(value & PTE_PFN_MASK), PAGE_SIZE);
	}
	up_read(&table->shape);
}

bool dax_flush_stores(struct dax_table *table, u64 first, u64 end)
{
	struct dax_dirty *dirty = kvzalloc(sizeof(*dirty), GFP_KERNEL | __GFP_NOFAIL);
	bool has_some = false;
	u64 page, next;

	spin_lock(&table->lock);
	end = min(end, table->reach);
	spin_unlock(&table->lock);
	for (page = first; page < end; page = next) {
		next = min(end, page + DAX_SYNC_PAGES);
		if (dax_collect(table, page, next, dirty)) {
			has_some = true;
			pt_mounts_flush(&table->mounts, page, next - page);
			dax_write_back(table, page, dirty);
			bitmap_zero(dirty->pages, DAX_SYNC_PAGES);
		}
		cond_resched();
	}
	/* What was written back is durable before anything that follows. */
	wmb();
	kvfree(dirty);
	return has_some;
}

int dax_fsync(struct file *file, loff_t start, loff_t end, int datasync)
{
	struct dax_handle *handle = file->private_data;
	bool has_some;

	if (handle->flags & VELLUM_DAX_NOSYNC)
		return 0;
	has_some = dax_flush_stores(handle->table, start >> PAGE_SHIFT,
				    ((u64)end >> PAGE_SHIFT) + 1);
	if (has_some && !mnt_want_write_file(handle->file)) {
		file_update_time(handle->file);
		mnt_drop_write_file(handle->file);
	}
	return vfs_fsync_range(handle->file, start, end, datasync);
}
