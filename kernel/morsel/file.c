// SPDX-License-Identifier: GPL-2.0
/* The operations on a Morsel's descriptor. include/uapi/vellum/morsel.h says what they promise. */

#include <linux/fs.h>
#include <linux/falloc.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/splice.h>
#include <linux/uaccess.h>
#include <linux/uio.h>

#include "core/sized.h"
#include "morsel/morsel.h"

/* The number of bytes to copy at the offset: up to the end of the page, or of the Morsel. */
static size_t morsel_part_of_page(const struct morsel *morsel, u64 offset, size_t count)
{
	u64 most = min_t(u64, PAGE_SIZE - offset_in_page(offset), morsel->length - offset);

	return min_t(u64, count, most);
}

static size_t morsel_copy_out(struct morsel *morsel, u64 offset, size_t count,
			      struct iov_iter *iter)
{
	struct page *page = morsel_get_page(morsel, offset >> PAGE_SHIFT);
	size_t copied;

	if (!page)
		return iov_iter_zero(count, iter);
	/* A pipe would take the page itself. It gets a copy of a device's page. */
	if (morsel->device)
		copied = copy_to_iter(page_address(page) + offset_in_page(offset), count, iter);
	else
		copied = copy_page_to_iter(page, offset_in_page(offset), count, iter);
	put_page(page);
	return copied;
}

static ssize_t morsel_read_iter(struct kiocb *kiocb, struct iov_iter *iter)
{
	struct morsel *morsel = morsel_of(file_inode(kiocb->ki_filp));
	size_t part, copied;
	ssize_t done = 0;

	if (READ_ONCE(morsel->is_revoked))
		return -EIO;
	while (iov_iter_count(iter) && kiocb->ki_pos < i_size_read(&morsel->inode)) {
		part = morsel_part_of_page(morsel, kiocb->ki_pos, iov_iter_count(iter));
		copied = morsel_copy_out(morsel, kiocb->ki_pos, part, iter);
		kiocb->ki_pos += copied;
		done += copied;
		if (copied < part)
			return done ?: -EFAULT;
		cond_resched();
	}
	return done;
}

static ssize_t morsel_copy_in(struct morsel *morsel, u64 offset, size_t count,
			      struct iov_iter *iter)
{
	struct page *page;
	size_t copied;
	int error;

	error = morsel_populate(morsel, offset >> PAGE_SHIFT);
	if (error)
		return error;
	page = morsel_get_page(morsel, offset >> PAGE_SHIFT);
	/*
	 * Another thread has taken the page off again, and what this one would have written went
	 * with it.
	 */
	if (!page) {
		iov_iter_advance(iter, count);
		return count;
	}
	copied = copy_page_from_iter(page, offset_in_page(offset), count, iter);
	put_page(page);
	return copied ?: -EFAULT;
}

static ssize_t morsel_copy_all_in(struct morsel *morsel, struct kiocb *kiocb, struct iov_iter *iter)
{
	ssize_t copied, done = 0;
	size_t part;

	while (iov_iter_count(iter) && kiocb->ki_pos < morsel->length) {
		part = morsel_part_of_page(morsel, kiocb->ki_pos, iov_iter_count(iter));
		copied = morsel_copy_in(morsel, kiocb->ki_pos, part, iter);
		if (copied < 0)
			return done ?: copied;
		kiocb->ki_pos += copied;
		done += copied;
		cond_resched();
	}
	/* A write does not change the length. */
	return done ?: iov_iter_count(iter) ? -EFBIG : 0;
}

static ssize_t morsel_write_iter(struct kiocb *kiocb, struct iov_iter *iter)
{
	struct morsel *morsel = morsel_of(file_inode(kiocb->ki_filp));
	ssize_t outcome;

	if (!morsel_is_shaped(morsel))
		return -EFBIG;
	if (kiocb->ki_flags & IOCB_APPEND)
		kiocb->ki_pos = morsel->length;
	outcome = morsel_begin_writing(morsel);
	if (outcome)
		return outcome;
	outcome = morsel_copy_all_in(morsel, kiocb, iter);
	morsel_end_writing(morsel);
	return outcome;
}

static long morsel_punch_hole(struct morsel *morsel, u64 offset, u64 length)
{
	long outcome = morsel_begin_writing(morsel);

	if (outcome)
		return outcome;
	outcome = morsel_punch(morsel, offset, length);
	morsel_end_writing(morsel);
	return outcome;
}

static long morsel_fallocate(struct file *file, int mode, loff_t offset, loff_t length)
{
	struct morsel *morsel = morsel_of(file_inode(file));
	u64 first = offset >> PAGE_SHIFT;

	if (!morsel_is_shaped(morsel))
		return -EFBIG;
	if (mode == (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE))
		return morsel_punch_hole(morsel, offset, length);
	if (offset + length > morsel->length)
		return -EFBIG;
	if (mode & ~FALLOC_FL_KEEP_SIZE)
		return -EOPNOTSUPP;
	return morsel_populate_range(morsel, first,
				     DIV_ROUND_UP(offset + length, PAGE_SIZE) - first);
}

/* The sizes that programs pass that were built for the first version of each structure. */
#define MORSEL_QUERY_SIZE_VER0		32
#define MORSEL_CREATE_SIZE_VER0	32
#define MORSEL_FILL_SIZE_VER0		40
#define MORSEL_STAT_SIZE_VER0		72

static long morsel_ioctl_query(unsigned long argument)
{
	struct vellum_morsel_query query;
	int size = vellum_copy_sized(&query, sizeof(query), MORSEL_QUERY_SIZE_VER0, argument);

	if (size < 0)
		return size;
	query = (struct vellum_morsel_query){
		.size = sizeof(query),
		.version = 1,
		.flags = MORSEL_FLAGS,
		.max_order = morsel_max_order(false),
	};
	return vellum_answer_sized(argument, size, &query, sizeof(query));
}

static long morsel_ioctl_create(struct morsel *morsel, unsigned long argument)
{
	struct vellum_morsel_create create;
	int size = vellum_copy_sized(&create, sizeof(create), MORSEL_CREATE_SIZE_VER0, argument);

	return size < 0 ? size : morsel_shape(morsel, &create);
}

static long morsel_ioctl_fill(struct file *file, unsigned long argument)
{
	struct morsel *morsel = morsel_of(file_inode(file));
	struct vellum_morsel_fill fill;
	int size = vellum_copy_sized(&fill, sizeof(fill), MORSEL_FILL_SIZE_VER0, argument);
	int error;

	if (size < 0)
		return size;
	fill.filled = 0;
	error = morsel_is_shaped(morsel) ? morsel_fill(file, &fill) : -EINVAL;
	return vellum_answer_sized(argument, size, &fill, sizeof(fill)) ?: error;
}

static void morsel_get_stat(struct morsel *morsel, struct vellum_morsel_stat *stat)
{
	struct pt_tree *reader = READ_ONCE(morsel->reader);

	*stat = (struct vellum_morsel_stat){
		.size = sizeof(*stat),
		.seals = READ_ONCE(morsel->seals),
	};
	if (!morsel_is_shaped(morsel))
		return;
	stat->order = morsel->order;
	stat->length = morsel->length;
	stat->flags = morsel->flags;
	stat->address = morsel->address;
	stat->pages = atomic64_read(&morsel->pages);
	stat->huge = atomic_long_read(&morsel->tree.huge);
	stat->tables = atomic_long_read(&morsel->tree.tables) +
		       (reader ? atomic_long_read(&reader->tables) : 0);
	stat->mounts = READ_ONCE(morsel->mounts.count);
}

static long morsel_ioctl_stat(struct morsel *morsel, unsigned long argument)
{
	struct vellum_morsel_stat stat;
	int size = vellum_copy_sized(&stat, sizeof(stat), MORSEL_STAT_SIZE_VER0, argument);

	if (size < 0)
		return size;
	if (READ_ONCE(morsel->is_revoked))
		return -EIO;
	morsel_get_stat(morsel, &stat);
	return vellum_answer_sized(argument, size, &stat, sizeof(stat));
}

static long morsel_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct morsel *morsel = morsel_of(file_inode(file));
	bool writes = file->f_mode & FMODE_WRITE;

	switch (command) {
	case VELLUM_MORSEL_SEAL:
		return writes ? morsel_seal(morsel, argument) : -EBADF;
	case VELLUM_MORSEL_REVOKE:
		if (!inode_owner_or_capable(vellum_file_idmap(file), file_inode(file)))
			return -EPERM;
		return argument ? -EINVAL : morsel_revoke(morsel);
	}
	switch (vellum_sized_command(command)) {
	case vellum_sized_command(VELLUM_MORSEL_QUERY):
		return morsel_ioctl_query(argument);
	case vellum_sized_command(VELLUM_MORSEL_STAT):
		return morsel_ioctl_stat(morsel, argument);
	case vellum_sized_command(VELLUM_MORSEL_CREATE):
		return writes ? morsel_ioctl_create(morsel, argument) : -EBADF;
	case vellum_sized_command(VELLUM_MORSEL_FILL):
		return writes ? morsel_ioctl_fill(file, argument) : -EBADF;
	}
	return -ENOTTY;
}

static void morsel_show_fdinfo(struct seq_file *out, struct file *file)
{
	struct vellum_morsel_stat stat;

	morsel_get_stat(morsel_of(file_inode(file)), &stat);
	seq_printf(out, "morsel-order:\t%u\nmorsel-length:\t%llu\nmorsel-pages:\t%llu\n",
		   stat.order, stat.length, stat.pages);
	seq_printf(out, "morsel-tables:\t%llu\nmorsel-mounts:\t%llu\nmorsel-seals:\t%#llx\n",
		   stat.tables, stat.mounts, stat.seals);
}

/*
 * Makes data durable. Only persistent memory needs that: CPUs may still have its data in their
 * caches.
 */
static int morsel_fsync(struct file *file, loff_t start, loff_t end, int only_data)
{
	struct morsel *morsel = morsel_of(file_inode(file));
	u64 number, last;
	struct page *page;

	if (!morsel->device || !morsel_is_shaped(morsel))
		return 0;
	last = min_t(u64, end >> PAGE_SHIFT, morsel_page_count(morsel) - 1);
	for (number = start >> PAGE_SHIFT; number <= last; number++) {
		page = morsel_get_page(morsel, number);
		if (page) {
			morsel_persist(page_address(page), PAGE_SIZE);
			put_page(page);
		}
		cond_resched();
	}
	return 0;
}

static int morsel_setattr(struct vellum_idmap *idmap, struct dentry *dentry,
			  struct iattr *attributes)
{
	struct inode *inode = d_inode(dentry);
	struct morsel *morsel = morsel_of(inode);
	int error = setattr_prepare(idmap, dentry, attributes);

	/* An open that truncates finds the Morsel without a shape. */
	if (!error && (attributes->ia_valid & ATTR_SIZE) && attributes->ia_size != inode->i_size) {
		error = morsel_is_shaped(morsel) ? -EINVAL :
			morsel_shape_by_length(morsel, attributes->ia_size);
	}
	if (error)
		return error;
	setattr_copy(idmap, inode, attributes);
	mutex_lock(&morsel->state);
	if (morsel->slot)
		morsel_slot_set_owner(morsel->slot, inode);
	mutex_unlock(&morsel->state);
	return 0;
}

static int morsel_getattr(struct vellum_idmap *idmap, const struct path *path, struct kstat *stat,
			  u32 mask, unsigned int flags)
{
	struct inode *inode = d_inode(path->dentry);

	vellum_fillattr(idmap, mask, inode, stat);
	stat->blocks = atomic64_read(&morsel_of(inode)->pages) << (PAGE_SHIFT - 9);
	return 0;
}

const struct file_operations morsel_file_operations = {
	.owner = THIS_MODULE,
	.llseek = generic_file_llseek,
	.read_iter = morsel_read_iter,
	.write_iter = morsel_write_iter,
	.splice_read = vellum_splice_read,
	.splice_write = iter_file_splice_write,
	.fallocate = morsel_fallocate,
	.unlocked_ioctl = morsel_ioctl,
	.mmap = morsel_map,
	.get_unmapped_area = morsel_area,
	.fsync = morsel_fsync,
	.show_fdinfo = morsel_show_fdinfo,
};

const struct inode_operations morsel_file_inode_operations = {
	.setattr = morsel_setattr,
	.getattr = morsel_getattr,
};
