// SPDX-License-Identifier: GPL-2.0
/*
 * Self-check: /sys/kernel/debug/vellum/file-tables has a line for each table, with all that does
 * not add up. While a table is in use the sums may differ by pages that are coming or going.
 *
 * /sys/kernel/debug/vellum/file-extents says what a probe has found: whether the module takes the
 * inode's lock when the file system counts extents, because the file system does not; and how often
 * it has counted.
 */

#include <linux/debugfs.h>
#include <linux/seq_file.h>

#include "dax/dax.h"

static void dax_check_show(void *out, struct dax_table *table)
{
	u64 wrong = dax_table_wrong(table);

	seq_printf(out, "inode %lu pages %llu order %u tables %ld mounts %llu barred %llu ",
		   dax_inode(table)->i_ino, table->pages, table->tree.order,
		   atomic_long_read(&table->tree.tables), table->mounts.count,
		   pt_mounts_barred(&table->mounts));
	seq_printf(out, "attachments %llu stale %d notices %llu ", dax_attachments_count(table),
		   dax_table_is_stale(table), table->notices);
	seq_printf(out, "kept %d wrong leaves %llu wrong entries %llu\n",
		   !refcount_read(&table->users), wrong,
		   pt_mounts_wrong(&table->mounts) + dax_attachments_wrong(table));
}

static int dax_tables_show(struct seq_file *out, void *unused)
{
	return dax_tables_each(dax_check_show, out);
}
DEFINE_SHOW_ATTRIBUTE(dax_tables);

static int dax_extents_show(struct seq_file *out, void *unused)
{
	enum dax_fiemap known = dax_blocks_knows();

	seq_printf(out, "probed %d lacks-lock %d counted %llu\n", known != DAX_FIEMAP_UNKNOWN,
		   known == DAX_FIEMAP_LACKS_LOCK, dax_blocks_counted());
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(dax_extents);

void dax_check_init(struct dentry *folder)
{
	debugfs_create_file("file-extents", 0400, folder, NULL, &dax_extents_fops);
	debugfs_create_file("file-tables", 0400, folder, NULL, &dax_tables_fops);
}
