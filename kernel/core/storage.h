/* SPDX-License-Identifier: GPL-2.0 */
/* Files that the module reads pages from. */
#ifndef VELLUM_STORAGE_H
#define VELLUM_STORAGE_H

#include <linux/fs.h>
#include <vellum/morsel.h>

/*
 * Whether the file stores its content, so that page n is at byte n * 4096 each time: a regular file
 * or a block device. procfs, sysfs, cgroups and configfs make up the content of their regular files
 * for each read. These file systems say that nothing in them may ever be executed. Of the file
 * systems that store files only morselfs says so.
 */
static inline bool vellum_file_has_storage(const struct file *file)
{
	const struct inode *inode = file_inode(file);
	const struct super_block *super = inode->i_sb;

	if (!S_ISREG(inode->i_mode) && !S_ISBLK(inode->i_mode))
		return false;
	if ((super->s_iflags & SB_I_NOEXEC) && super->s_magic != VELLUM_MORSEL_MAGIC)
		return false;
	return file->f_op->read_iter;
}

#endif /* VELLUM_STORAGE_H */
