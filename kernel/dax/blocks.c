// SPDX-License-Identifier: GPL-2.0
/*
 * Where a file's blocks are in memory.
 *
 * The file system says which block a page is in, by the call that swap files and boot loaders use.
 * It names no block for a hole, nor for a block that was reserved and never written: no process may
 * see the old bytes of such a block. The device says where a block is in memory, and refuses blocks
 * that it knows to be damaged.
 *
 * That call answers for one page. The one that answers by extents writes to user memory alone, but
 * it also counts. So if the first and the last of some pages are in blocks that are as far from
 * each other as the pages, and the file system counts one extent from the one to the other, then
 * the blocks between them are known. The count is asked for last: a page that has a block keeps it,
 * unless pages are marked as stale (dax.h), so both ends are in the extent that was counted.
 *
 * Two flaws of that call are worked around:
 *
 * - It may forget an error: what it could not read is not counted. SEEK_HOLE reads the same, and
 *   tells errors. So only pages that it has found no hole in, and no error, are counted.
 * - ext4 counts without the inode's lock, in kernels that lack "ext4: prevent stale extent cache
 *   entries caused by concurrent fiemap". If the file loses blocks meanwhile, ext4 may keep what
 *   was so before. The module takes the lock there, and must not take it twice elsewhere, so a
 *   probe finds out. Until it has, pages are asked for one by one.
 */

#include <linux/completion.h>
#include <linux/dax.h>
#include <linux/fiemap.h>
#include <linux/fileattr.h>
#include <linux/mutex.h>
#include <linux/pfn_t.h>
#include <linux/sched/signal.h>
#include <linux/workqueue.h>

#include "dax/dax.h"

/* To count the extents of fewer pages than these takes longer than to ask for each. */
#define DAX_EXTENT_LEAST	5

/* No extent of ext4's is longer. Between counts the refresh looks for signals, and reschedules. */
#define DAX_EXTENT_MOST		32768

static DEFINE_MUTEX(dax_blocks_probing);
static enum dax_fiemap dax_blocks_fiemap;
static atomic64_t dax_blocks_counts;

/*
 * Whether a file without DAX may take the blocks over, of which nothing tells the module: ext4
 * refuses EXT4_IOC_MOVE_EXT only if the file that it names first has DAX. There are files of both
 * kinds where each one's flag decides (the mount option dax=inode). The inode of a file with DAX
 * then has the flag, or has lost it since it was read; the file system asks the kernel to drop such
 * an inode early, before it changes the flag.
 */
static bool dax_blocks_may_move(const struct file *file)
{
	struct fileattr attributes;

	if (vfs_fileattr_get(file->f_path.dentry, &attributes) ||
	    (attributes.fsx_xflags & FS_XFLAG_DAX))
		return true;
	smp_rmb();	/* the flag before the request */
	return READ_ONCE(file_inode(file)->i_state) & I_DONTCACHE;
}

int dax_blocks_open(struct dax_table *table, const struct file *file)
{
	struct inode *inode = dax_inode(table);

	if (inode->i_blkbits != PAGE_SHIFT || !table->mapping->a_ops->bmap ||
	    !inode->i_sb->s_bdev || dax_blocks_may_move(file))
		return -EOPNOTSUPP;
	table->device = fs_dax_get_by_bdev(inode->i_sb->s_bdev, &table->offset, NULL, NULL);
	return table->device ? 0 : -EOPNOTSUPP;
}

void dax_blocks_close(struct dax_table *table)
{
	fs_put_dax(table->device, NULL);
}

bool dax_blocks_can_be_durable(const struct dax_table *table)
{
	return dax_synchronous(table->device);
}

/* Returns how many of these blocks have frames in a row, and the first frame. */
static unsigned int dax_blocks_locate(struct dax_table *table, u64 block, unsigned int count,
				      u64 *frame)
{
	u64 page = (table->offset >> PAGE_SHIFT) + block;
	void *address;
	long found;
	pfn_t pfn;
	int id;

	id = dax_read_lock();
	found = dax_direct_access(table->device, page, count, DAX_ACCESS, &address, &pfn);
	dax_read_unlock(id);
	/* One damaged block refuses all that were asked for. */
	if (found <= 0 && count > 1)
		return dax_blocks_locate(table, block, 1, frame);
	*frame = found > 0 ? pfn_t_to_pfn(pfn) : 0;
	return found > 0 ? min_t(u64, found, count) : 1;
}

/* Replaces blocks by their frames. */
static void dax_blocks_to_frames(struct dax_table *table, unsigned int count, u64 *blocks)
{
	unsigned int i, run, found;
	u64 frame;

	for (i = 0; i < count; i += found) {
		found = 1;
		if (!blocks[i])
			continue;
		for (run = 1; i + run < count && blocks[i + run] == blocks[i] + run;)
			run++;
		found = dax_blocks_locate(table, blocks[i], run, &frame);
		for (run = 0; run < found; run++)
			blocks[i + run] = frame ? frame + run : 0;
	}
}

u64 dax_blocks_next(struct file *file, u64 page)
{
	loff_t found = vfs_llseek(file, page << PAGE_SHIFT, SEEK_DATA);

	if (found == -ENXIO)
		return U64_MAX;
	return found < 0 ? page : (u64)found >> PAGE_SHIFT;
}

/* The page's block, or 0. Block 0 is no file's: the superblock is in it. */
static u64 dax_block_of(struct inode *inode, u64 page)
{
	sector_t block = page;

	return bmap(inode, &block) ? 0 : block;
}

/* The probe. */

struct dax_blocks_probe {
	struct work_struct	work;
	struct inode		*inode;
	struct task_struct	*task;		/* the worker */
	struct completion	started, locked, ended;
	bool			is_locked;	/* the inode, by the prober */
};

static void dax_blocks_probe_work(struct work_struct *work)
{
	struct dax_blocks_probe *probe = container_of(work, struct dax_blocks_probe, work);
	struct fiemap_extent_info counted = {};

	probe->task = current;
	complete(&probe->started);
	wait_for_completion(&probe->locked);
	/* No bytes: an error at once, unless it waits for the lock before it looks. */
	if (probe->is_locked)
		probe->inode->i_op->fiemap(probe->inode, &counted, 0, 0);
	complete(&probe->ended);
}

/* Finds out whether the call takes the lock, which this thread holds. */
static enum dax_fiemap dax_blocks_probe_locked(struct dax_blocks_probe *probe)
{
	probe->is_locked = true;
	complete(&probe->locked);
	if (wait_for_completion_timeout(&probe->ended, HZ))
		return DAX_FIEMAP_LACKS_LOCK;
	/* A worker that has had no processor does not sleep. */
	return READ_ONCE(probe->task->__state) & TASK_UNINTERRUPTIBLE ? DAX_FIEMAP_LOCKS :
									DAX_FIEMAP_UNKNOWN;
}

/*
 * The lock is taken after the worker has started, because to make a worker may take memory, which
 * the file's writers may have to free. It is not waited for: the next refresh probes, too.
 */
void dax_blocks_probe(const struct dax_table *table)
{
	struct dax_blocks_probe probe = { .inode = dax_inode(table) };

	if (dax_blocks_knows() != DAX_FIEMAP_UNKNOWN || !probe.inode->i_op->fiemap ||
	    !mutex_trylock(&dax_blocks_probing))
		return;
	INIT_WORK_ONSTACK(&probe.work, dax_blocks_probe_work);
	init_completion(&probe.started);
	init_completion(&probe.locked);
	init_completion(&probe.ended);
	queue_work(dax_work, &probe.work);
	wait_for_completion(&probe.started);
	if (inode_trylock(probe.inode)) {
		WRITE_ONCE(dax_blocks_fiemap, dax_blocks_probe_locked(&probe));
		inode_unlock(probe.inode);
	} else {
		complete(&probe.locked);
	}
	flush_work(&probe.work);
	destroy_work_on_stack(&probe.work);
	mutex_unlock(&dax_blocks_probing);
}

enum dax_fiemap dax_blocks_knows(void)
{
	return READ_ONCE(dax_blocks_fiemap);
}

u64 dax_blocks_counted(void)
{
	return atomic64_read(&dax_blocks_counts);
}

/* Counting. */

/* Whether the file system has no error and no hole in these pages. Asks it once for each run. */
static bool dax_can_read(struct dax_lookup *lookup, u64 page, u64 count)
{
	loff_t hole;

	if (!lookup->has_failed && (page < lookup->first || page >= lookup->end)) {
		hole = vfs_llseek(lookup->file, page << PAGE_SHIFT, SEEK_HOLE);
		lookup->has_failed = hole < 0;
		lookup->first = page;
		lookup->end = hole < 0 ? page : DIV_ROUND_UP((u64)hole, PAGE_SIZE);
	}
	return page >= lookup->first && page + count <= lookup->end;
}

/* Whether the file system counts one extent in so many pages, whatever its kind. */
static bool dax_is_one_extent(struct dax_lookup *lookup, u64 page, u64 count)
{
	struct inode *inode = file_inode(lookup->file);
	struct fiemap_extent_info counted = {};
	enum dax_fiemap known = dax_blocks_knows();
	int error;

	if (known == DAX_FIEMAP_UNKNOWN || !inode->i_op->fiemap || count > DAX_EXTENT_MOST ||
	    !dax_can_read(lookup, page, count))
		return false;
	atomic64_inc(&dax_blocks_counts);
	if (known == DAX_FIEMAP_LACKS_LOCK)
		inode_lock_shared(inode);
	error = inode->i_op->fiemap(inode, &counted, page << PAGE_SHIFT, count << PAGE_SHIFT);
	if (known == DAX_FIEMAP_LACKS_LOCK)
		inode_unlock_shared(inode);
	return !error && counted.fi_extents_mapped == 1;
}

/* Finds the blocks between the first and the last of some pages. The blocks of these are there. */
static void dax_blocks_between(struct dax_lookup *lookup, u64 page, unsigned int count,
			       u64 *blocks)
{
	unsigned int middle = count / 2, i;

	if (count <= 2)
		return;
	if (count >= DAX_EXTENT_LEAST && blocks[0] && blocks[count - 1] == blocks[0] + count - 1 &&
	    dax_is_one_extent(lookup, page, count)) {
		for (i = 1; i < count - 1; i++)
			blocks[i] = blocks[0] + i;
		return;
	}
	blocks[middle] = dax_block_of(file_inode(lookup->file), page + middle);
	dax_blocks_between(lookup, page, middle + 1, blocks);
	dax_blocks_between(lookup, page + middle, count - middle, blocks + middle);
}

int dax_blocks_find(struct dax_table *table, struct dax_lookup *lookup, u64 page,
		    unsigned int count, u64 *frames)
{
	struct inode *inode = dax_inode(table);

	frames[0] = dax_block_of(inode, page);
	if (count > 1) {
		frames[count - 1] = dax_block_of(inode, page + count - 1);
		dax_blocks_between(lookup, page, count, frames);
	}
	if (fatal_signal_pending(current))
		return -EINTR;
	cond_resched();
	dax_blocks_to_frames(table, count, frames);
	return 0;
}

/* Whether all blocks from the first to the last of some pages are in a row, as these two are. */
static bool dax_blocks_go_on(struct dax_lookup *lookup, u64 page, u64 count, u64 block)
{
	u64 middle = count / 2;

	cond_resched();
	if (fatal_signal_pending(current))
		return false;
	if (count <= 2 || dax_is_one_extent(lookup, page, count))
		return true;
	/* What is in a row need not be one extent. */
	return dax_block_of(file_inode(lookup->file), page + middle) == block + middle &&
	       dax_blocks_go_on(lookup, page, middle + 1, block) &&
	       dax_blocks_go_on(lookup, page + middle, count - middle, block + middle);
}

bool dax_blocks_are(struct dax_lookup *lookup, u64 page, u64 count, u64 block)
{
	struct inode *inode = file_inode(lookup->file);

	return dax_block_of(inode, page) == block &&
	       (count == 1 || dax_block_of(inode, page + count - 1) == block + count - 1) &&
	       dax_blocks_go_on(lookup, page, count, block);
}

void dax_blocks_place(struct dax_table *table, u64 block, unsigned int count, u64 *frames)
{
	unsigned int i;

	for (i = 0; i < count; i++)
		frames[i] = block + i;
	dax_blocks_to_frames(table, count, frames);
}
