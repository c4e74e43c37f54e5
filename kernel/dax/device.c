// SPDX-License-Identifier: GPL-2.0
/* The device that opens tables, and a table's descriptor. uapi/vellum/dax.h is the manual. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/anon_inodes.h>
#include <linux/debugfs.h>
#include <linux/file.h>
#include <linux/magic.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/mman.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "core/pt_tree.h"
#include "core/sized.h"
#include "dax/dax.h"
#include "dax/heap.h"

#define DAX_FLAGS	(VELLUM_DAX_DURABLE | VELLUM_DAX_NOSYNC)

static const struct file_operations dax_table_operations;

/* Tables. */

static void dax_count_leaf(void *count, u64 page, pteval_t leaf)
{
	++*(u64 *)count;
}

static long dax_ioctl_stat(struct dax_handle *handle, unsigned long argument)
{
	struct dax_table *table = handle->table;
	struct vellum_dax_stat stat = {};
	int size = vellum_copy_sized(&stat, sizeof(stat),
				     offsetof(struct vellum_dax_stat, attachments), argument);

	if (size < 0)
		return size;
	memset(&stat, 0, sizeof(stat));
	stat.size = sizeof(stat);
	stat.order = READ_ONCE(table->tree.order);
	dax_table_each_leaf(table, dax_count_leaf, &stat.leaves);
	stat.tables = atomic_long_read(&table->tree.tables);
	stat.mounts = READ_ONCE(table->mounts.count);
	stat.barred = pt_mounts_barred(&table->mounts);
	stat.attachments = dax_attachments_count(table);
	stat.stale = dax_table_is_stale(table);
	spin_lock(&table->lock);
	stat.pages = table->pages;
	stat.flags = table->is_durable ? VELLUM_DAX_DURABLE : 0;
	stat.stored = table->stored;
	spin_unlock(&table->lock);
	return vellum_answer_sized(argument, size, &stat, sizeof(stat));
}

static long dax_table_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct dax_handle *handle = file->private_data;

	switch (vellum_sized_command(command)) {
	case VELLUM_DAX_REFRESH:
		return dax_table_refresh(handle->table, handle->file);
	case vellum_sized_command(VELLUM_DAX_STAT):
		return dax_ioctl_stat(handle, argument);
	}
	return -ENOTTY;
}

static void dax_handle_free(struct dax_handle *handle)
{
	dax_table_put(handle->table, handle->file);
	fput(handle->file);
	kfree(handle);
}

static int dax_table_release_file(struct inode *inode, struct file *file)
{
	dax_handle_free(file->private_data);
	return 0;
}

static const struct file_operations dax_table_operations = {
	.owner = THIS_MODULE,
	.release = dax_table_release_file,
	.unlocked_ioctl = dax_table_ioctl,
	.mmap = dax_map,
	VELLUM_MAY_MAP_SYNC,
	.get_unmapped_area = dax_area,
	.fsync = dax_fsync,
	.llseek = noop_llseek,
};

const struct dax_handle *dax_handle_of(const struct file *file)
{
	return file->f_op == &dax_table_operations ? file->private_data : NULL;
}

/* The device. */

static long dax_ioctl_query(unsigned long argument)
{
	struct vellum_dax_query query = {};
	int size = vellum_copy_sized(&query, sizeof(query), sizeof(query), argument);

	if (size < 0)
		return size;
	query = (struct vellum_dax_query){
		.size = sizeof(query),
		.version = 1,
		.features = VELLUM_DAX_HAS_HEAPS | VELLUM_DAX_KEEPS_TABLES |
			    VELLUM_DAX_READS_STORED,
		.flags = DAX_FLAGS,
	};
	return vellum_answer_sized(argument, size, &query, sizeof(query));
}

static long dax_ioctl_tables(unsigned long argument)
{
	struct vellum_dax_tables counts = {};
	int size = vellum_copy_sized(&counts, sizeof(counts),
				     offsetof(struct vellum_dax_tables, stored_used), argument);

	if (size < 0)
		return size;
	dax_tables_count(&counts);
	counts.size = sizeof(counts);
	return vellum_answer_sized(argument, size, &counts, sizeof(counts));
}

int dax_check_file(const struct file *file)
{
	const struct inode *inode = file_inode(file);

	if (!(file->f_mode & FMODE_READ))
		return -EBADF;
	if (!S_ISREG(inode->i_mode) || !IS_DAX(inode) || !file->f_op->mmap)
		return -EOPNOTSUPP;
	/* Of other file systems it is not tested in which order they free blocks. */
	if (inode->i_sb->s_magic != EXT4_SUPER_MAGIC)
		return -EOPNOTSUPP;
	if (IS_APPEND(inode) && (file->f_mode & FMODE_WRITE))
		return -EACCES;
	if (i_size_read(inode) > VELLUM_DAX_MAX_EXTENT)
		return -EFBIG;
	return 0;
}

/* Makes a new table's leaves, or those that are missing. */
static int dax_handle_start(struct dax_handle *handle)
{
	int error;

	if (handle->flags & VELLUM_DAX_DURABLE)
		error = dax_table_make_durable(handle->table, handle->file);
	else
		error = dax_table_refresh(handle->table, handle->file);
	/* The file system serves a file that changes all the time. */
	return error == -EBUSY ? 0 : error;
}

/* Takes over the reference to the file. */
static struct dax_handle *dax_handle_make(struct file *file, u64 flags)
{
	struct dax_handle *handle = kzalloc(sizeof(*handle), GFP_KERNEL_ACCOUNT);
	struct dax_table *table;
	int error;

	table = handle ? dax_table_open(file) : ERR_PTR(-ENOMEM);
	if (IS_ERR(table)) {
		kfree(handle);
		fput(file);
		return ERR_CAST(table);
	}
	*handle = (struct dax_handle){ table, file, flags };
	error = dax_handle_start(handle);
	if (!error)
		return handle;
	dax_handle_free(handle);
	return ERR_PTR(error);
}

/*
 * Gives the caller a descriptor. Its mappings are among those of the file, so the kernel unmaps
 * them when it unmaps pages of the file.
 */
static long dax_handle_install(struct dax_handle *handle)
{
	unsigned int mode = handle->file->f_mode & FMODE_WRITE ? O_RDWR : O_RDONLY;
	int descriptor = get_unused_fd_flags(O_CLOEXEC);
	struct file *file;

	if (descriptor < 0)
		return descriptor;
	file = anon_inode_getfile("[vellum-dax]", &dax_table_operations, handle, mode);
	if (IS_ERR(file)) {
		put_unused_fd(descriptor);
		return PTR_ERR(file);
	}
	file->f_mapping = handle->table->mapping;
	fd_install(descriptor, file);
	return descriptor;
}

static long dax_ioctl_open(unsigned long argument)
{
	struct vellum_dax_open open = {};
	int size = vellum_copy_sized(&open, sizeof(open), sizeof(open), argument);
	struct dax_handle *handle;
	struct file *file;
	long outcome;

	if (size < 0)
		return size;
	if ((open.flags & ~DAX_FLAGS) ||
	    (open.flags & DAX_FLAGS) == VELLUM_DAX_NOSYNC)
		return -EINVAL;
	file = fget(open.file);
	if (!file)
		return -EBADF;
	outcome = dax_check_file(file);
	if (outcome) {
		fput(file);
		return outcome;
	}
	handle = dax_handle_make(file, open.flags);
	if (IS_ERR(handle))
		return PTR_ERR(handle);
	outcome = dax_handle_install(handle);
	if (outcome < 0)
		dax_handle_free(handle);
	return outcome;
}

static long dax_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	switch (vellum_sized_command(command)) {
	case vellum_sized_command(VELLUM_DAX_QUERY):
		return dax_ioctl_query(argument);
	case vellum_sized_command(VELLUM_DAX_OPEN):
		return dax_ioctl_open(argument);
	case vellum_sized_command(VELLUM_DAX_HEAP):
		return dax_heap_open(argument);
	case vellum_sized_command(VELLUM_DAX_TABLES):
		return dax_ioctl_tables(argument);
	}
	return -ENOTTY;
}

static const struct file_operations dax_operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = dax_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice dax_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "vellum-dax",
	.fops = &dax_operations,
	.mode = 0600,
};

static bool dax_is_there;

/* Without a watch on lost blocks there is no device; the rest of the module does without. */
int dax_init(struct dentry *folder)
{
	int error = dax_stored_start();

	if (error)
		return error;
	error = dax_tables_start();
	if (error)
		goto no_tables;
	error = dax_watch_start();
	if (error) {
		pr_warn("ftrace cannot watch files lose blocks (%d): no file tables\n", error);
		error = 0;
		goto no_watch;
	}
	dax_check_init(folder);
	error = misc_register(&dax_misc);
	if (error)
		goto no_device;
	dax_is_there = true;
	return 0;
no_device:
	dax_watch_end();
no_watch:
	dax_tables_end();
no_tables:
	dax_stored_end();
	return error;
}

void dax_exit(void)
{
	if (!dax_is_there)
		return;
	misc_deregister(&dax_misc);
	dax_watch_end();
	dax_tables_end();
	dax_stored_end();
}
