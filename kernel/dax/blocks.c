// SPDX-License-Identifier: GPL-2.0
/*
 * Where a file's blocks are in memory.
 *
 * The file system says which block a page is in, by the call that swap files and boot loaders use.
 * It names no block for a hole, nor for a block that was reserved and never written: no process may
 * see the old bytes of such a block. The device says where a block is in memory, and refuses blocks
 * that it knows to be damaged.
 */

#include <linux/dax.h>
#include <linux/fileattr.h>
#include <linux/pfn_t.h>
#include <linux/sched/signal.h>

#include "dax/dax.h"

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

int dax_blocks_find(struct dax_table *table, u64 page, unsigned int count, u64 *frames)
{
	struct inode *inode = dax_inode(table);
	unsigned int i;
	sector_t block;

	for (i = 0; i < count; i++) {
		block = page + i;
		/* Block 0 is no file's: the superblock is in it. */
		frames[i] = bmap(inode, &block) ? 0 : block;
	}
	if (fatal_signal_pending(current))
		return -EINTR;
	cond_resched();
	dax_blocks_to_frames(table, count, frames);
	return 0;
}
