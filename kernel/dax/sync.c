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
#define DAX_SYNC_PAGES	(8 * PT_ENTRIES)

/* What was stored to, by frames: a refresh may give the pages others meanwhile. */
struct dax_dirty {
	unsigned int	count;
	u64		frames[DAX_SYNC_PAGES];
};

/* Clears the dirty bits of up to DAX_SYNC_PAGES pages, and notes the frames. */
static void dax_collect(struct dax_table *table, u64 first, u64 end, struct dax_dirty *dirty)
{
	pteval_t *leaf, old;
	spinlock_t *lock;
	u64 page;

	dirty->count = 0;
	down_read(&table->shape);
	for (page = first; page < end; page++) {
		leaf = pt_tree_leaf(&table->tree, page);
		if (!leaf) {
			page = round_down(page, PT_ENTRIES) + PT_ENTRIES - 1;
			continue;
		}
		if (!(READ_ONCE(*leaf) & _PAGE_DIRTY))
			continue;
		lock = pt_table_lock(leaf);
		spin_lock(lock);
		old = READ_ONCE(*leaf);
		while (!try_cmpxchg(leaf, &old, old & ~_PAGE_DIRTY))
			;
		spin_unlock(lock);
		if (old & _PAGE_DIRTY)
			dirty->frames[dirty->count++] = pt_leaf_pfn(old);
	}
	up_read(&table->shape);
}

static void dax_write_back(const struct dax_dirty *dirty)
{
	unsigned int i;

	/* A block may be another file's by now. Writing it back changes nothing. */
	for (i = 0; i < dirty->count; i++)
		arch_wb_cache_pmem(__va(dirty->frames[i] << PAGE_SHIFT), PAGE_SIZE);
}

/*
 * A thread that finds no dirty bit because another one has cleared it waits until that one has
 * written the page back.
 */
void dax_flush_stores(struct dax_table *table, u64 first, u64 end)
{
	struct dax_dirty *dirty = kvzalloc(sizeof(*dirty), GFP_KERNEL | __GFP_NOFAIL);
	u64 page, next;

	mutex_lock(&table->syncing);
	dax_attachments_empty(table, first, end);
	spin_lock(&table->lock);
	end = min(end, table->reach);
	spin_unlock(&table->lock);
	for (page = first; page < end; page = next) {
		next = min(end, page + DAX_SYNC_PAGES);
		dax_collect(table, page, next, dirty);
		if (dirty->count) {
			WRITE_ONCE(table->is_stored, true);
			pt_mounts_flush(&table->mounts, page, next - page);
			dax_attachments_flush(table, page, next);
			dax_write_back(dirty);
		}
		cond_resched();
	}
	/* What was written back is durable before anything that follows. */
	wmb();
	mutex_unlock(&table->syncing);
	kvfree(dirty);
}

/* A frozen file system, or one that is read-only here, has its times updated by a later call. */
void dax_update_times(struct dax_table *table, struct file *file)
{
	struct super_block *super = dax_inode(table)->i_sb;

	if (!file || !READ_ONCE(table->is_stored) || __mnt_is_readonly(file->f_path.mnt) ||
	    !sb_start_write_trylock(super))
		return;
	WRITE_ONCE(table->is_stored, false);
	if (file_update_time(file))
		WRITE_ONCE(table->is_stored, true);
	sb_end_write(super);
}

int dax_sync(struct dax_table *table, struct file *file, loff_t start, loff_t end, int datasync)
{
	/* Blocks may have moved in the file: dirty bits are at the old places. */
	bool is_stale = dax_table_is_stale(table);

	dax_flush_stores(table, is_stale ? 0 : start >> PAGE_SHIFT,
			 is_stale ? U64_MAX : ((u64)end >> PAGE_SHIFT) + 1);
	dax_update_times(table, file);
	return vfs_fsync_range(file, start, end, datasync);
}

int dax_fsync(struct file *file, loff_t start, loff_t end, int datasync)
{
	const struct dax_handle *handle = file->private_data;

	if (handle->flags & VELLUM_DAX_NOSYNC)
		return 0;
	return dax_sync(handle->table, handle->file, start, end, datasync);
}
