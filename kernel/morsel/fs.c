// SPDX-License-Identifier: GPL-2.0
/*
 * The file system: names, owners, modes, and a limit on the memory of its Morsels. Without a device
 * all of it is in memory, and gone when it is unmounted.
 */

#include <linux/fs_context.h>
#include <linux/fs_parser.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/statfs.h>

#include "morsel/morsel.h"

/* A mounted file system. */
struct morselfs {
	atomic64_t	pages;		/* charged: data and page tables */
	u64		max_pages;
	atomic64_t	inodes;
	u64		max_inodes;
	struct morsel_device *device;	/* or NULL */
	/* See morsel_charging(). */
	struct rw_semaphore charging;
};

/* The options of a mount. */
struct morselfs_options {
	u64	max_pages, max_inodes;
	umode_t	mode;
	kuid_t	uid;
	kgid_t	gid;
	bool	format;
};

static struct kmem_cache *morselfs_inode_cache;

static struct morselfs *morselfs_of(const struct super_block *super)
{
	return super->s_fs_info;
}

/*
 * Adds `count`, unless the sum would exceed the limit. Nothing is added for a moment: another
 * thread would be refused less than there is room for.
 */
static bool morselfs_take(atomic64_t *taken, u64 count, u64 most)
{
	s64 before = atomic64_read(taken);

	do {
		if (before + count > most)
			return false;
	} while (!atomic64_try_cmpxchg(taken, &before, before + count));
	return true;
}

bool morsel_charge(struct morsel *morsel, u64 pages)
{
	struct morselfs *morsels = morselfs_of(morsel->inode.i_sb);

	if (!morselfs_take(&morsels->pages, pages, morsels->max_pages))
		return false;
	if (!morsel->user || morselfs_take(&morsel->user->locked_vm, pages, morsel->lock_limit))
		return true;
	atomic64_sub(pages, &morsels->pages);
	return false;
}

void morsel_uncharge(struct morsel *morsel, u64 pages)
{
	atomic64_sub(pages, &morselfs_of(morsel->inode.i_sb)->pages);
	if (morsel->user)
		atomic64_sub(pages, &morsel->user->locked_vm);
}

/*
 * Makes the Morsel's memory locked memory of the user who makes the Morsel, as it cannot be swapped
 * out. Other processes may bring the pages, and a Morsel may outlive all of them. A device's pages
 * are not charged to a user.
 */
static void morsel_make_locked(struct morsel *morsel)
{
	if (morsel->device || capable(CAP_IPC_LOCK))
		return;
	morsel->user = get_uid(current_user());
	morsel->lock_limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
}

int morsel_charging(struct morsel *morsel, u64 page, int (*attempt)(struct morsel *, u64))
{
	struct rw_semaphore *charging = &morselfs_of(morsel->inode.i_sb)->charging;
	int error;

	down_read(charging);
	error = attempt(morsel, page);
	up_read(charging);
	if (error != -ENOSPC)
		return error;
	down_write(charging);
	error = attempt(morsel, page);
	up_write(charging);
	return error;
}

static const struct inode_operations morselfs_dir_inode_ops, morselfs_device_dir_inode_ops;

static struct inode *morselfs_make_inode(struct super_block *super, const struct inode *folder,
					 umode_t mode)
{
	struct morselfs *morsels = morselfs_of(super);
	struct inode *inode;

	if (!morselfs_take(&morsels->inodes, 1, morsels->max_inodes))
		return ERR_PTR(-ENOSPC);
	inode = new_inode(super);
	if (!inode) {
		atomic64_dec(&morsels->inodes);
		return ERR_PTR(-ENOMEM);
	}
	inode->i_ino = get_next_ino();
	inode_init_owner(VELLUM_NOP_IDMAP, inode, folder, mode);
	vellum_inode_init_times(inode);
	mapping_set_unevictable(inode->i_mapping);
	if (S_ISDIR(mode)) {
		inode->i_op = morsels->device ? &morselfs_device_dir_inode_ops :
			      &morselfs_dir_inode_ops;
		inode->i_fop = &simple_dir_operations;
		inc_nlink(inode);
	} else {
		inode->i_op = &morsel_file_inode_operations;
		inode->i_fop = &morsel_file_operations;
		morsel_of(inode)->device = morsels->device;
		morsel_make_locked(morsel_of(inode));
		morsel_register(morsel_of(inode));
	}
	return inode;
}

/* False: the device has no room for another name. */
static bool morselfs_name_on_device(struct inode *inode, const struct dentry *entry)
{
	struct morsel *morsel = morsel_of(inode);

	if (!morsel->device)
		return true;
	morsel->slot = morsel_slot_make(morsel->device, inode, entry->d_name.name);
	return morsel->slot;
}

static int morselfs_make_entry(struct inode *folder, struct dentry *entry, umode_t mode)
{
	struct inode *inode = morselfs_make_inode(folder->i_sb, folder, mode);

	if (IS_ERR(inode))
		return PTR_ERR(inode);
	if (!morselfs_name_on_device(inode, entry)) {
		iput(inode);
		return -ENOSPC;
	}
	if (S_ISDIR(mode))
		inc_nlink(folder);
	d_instantiate(entry, inode);
	dget(entry); /* the dentry cache is the only place that has the entry */
	vellum_inode_touch(folder);
	return 0;
}

static int morselfs_create(struct vellum_idmap *idmap, struct inode *folder, struct dentry *entry,
			   umode_t mode, bool exclusive)
{
	return morselfs_make_entry(folder, entry, mode | S_IFREG);
}

static int morselfs_mkdir(struct vellum_idmap *idmap, struct inode *folder, struct dentry *entry,
			  umode_t mode)
{
	return morselfs_make_entry(folder, entry, mode | S_IFDIR);
}

/* O_TMPFILE: makes a file without a name, until it is given one. */
static int morselfs_tmpfile(struct vellum_idmap *idmap, struct inode *folder, struct file *file,
			    umode_t mode)
{
	struct inode *inode = morselfs_make_inode(folder->i_sb, folder, mode | S_IFREG);

	if (IS_ERR(inode))
		return finish_open_simple(file, PTR_ERR(inode));
	d_tmpfile(file, inode);
	return finish_open_simple(file, 0);
}

static const struct inode_operations morselfs_dir_inode_ops = {
	.lookup = simple_lookup,
	.create = morselfs_create,
	.tmpfile = morselfs_tmpfile,
	.link = simple_link,
	.unlink = simple_unlink,
	.mkdir = morselfs_mkdir,
	.rmdir = simple_rmdir,
	.rename = simple_rename,
	.getattr = simple_getattr,
};

static int morselfs_unlink(struct inode *folder, struct dentry *entry)
{
	morsel_lose_name(morsel_of(d_inode(entry)));
	return simple_unlink(folder, entry);
}

/* A device has names of files only, and each file has one. */
static const struct inode_operations morselfs_device_dir_inode_ops = {
	.lookup = simple_lookup,
	.create = morselfs_create,
	.tmpfile = morselfs_tmpfile,
	.unlink = morselfs_unlink,
	.getattr = simple_getattr,
};

static struct inode *morselfs_alloc_inode(struct super_block *super)
{
	struct morsel *morsel = alloc_inode_sb(super, morselfs_inode_cache, GFP_KERNEL);

	if (!morsel)
		return NULL;
	INIT_LIST_HEAD(&morsel->node);
	morsel_start(morsel);
	return &morsel->inode;
}

static void morselfs_free_inode(struct inode *inode)
{
	kmem_cache_free(morselfs_inode_cache, morsel_of(inode));
}

static void morselfs_evict_inode(struct inode *inode)
{
	truncate_inode_pages_final(&inode->i_data);
	clear_inode(inode);
	if (S_ISREG(inode->i_mode))
		morsel_unregister(morsel_of(inode));
	morsel_end(morsel_of(inode));
	free_uid(morsel_of(inode)->user);
	atomic64_dec(&morselfs_of(inode->i_sb)->inodes);
}

static int morselfs_statfs(struct dentry *entry, struct kstatfs *stat)
{
	struct morselfs *morsels = morselfs_of(entry->d_sb);

	stat->f_type = VELLUM_MORSEL_MAGIC;
	stat->f_bsize = PAGE_SIZE;
	stat->f_namelen = NAME_MAX;
	stat->f_blocks = morsels->max_pages;
	stat->f_bfree = morsels->max_pages - atomic64_read(&morsels->pages);
	stat->f_bavail = stat->f_bfree;
	stat->f_files = morsels->max_inodes;
	stat->f_ffree = morsels->max_inodes - atomic64_read(&morsels->inodes);
	return 0;
}

static int morselfs_show_options(struct seq_file *out, struct dentry *root)
{
	struct morselfs *morsels = morselfs_of(root->d_sb);

	seq_printf(out, ",size=%lluk,inodes=%llu", morsels->max_pages << (PAGE_SHIFT - 10),
		   morsels->max_inodes);
	return 0;
}

static const struct super_operations morselfs_super_ops = {
	.alloc_inode = morselfs_alloc_inode,
	.free_inode = morselfs_free_inode,
	.drop_inode = generic_delete_inode,
	.evict_inode = morselfs_evict_inode,
	.statfs = morselfs_statfs,
	.show_options = morselfs_show_options,
};

enum { OPTION_SIZE, OPTION_INODES, OPTION_MODE, OPTION_UID, OPTION_GID, OPTION_FORMAT };

static const struct fs_parameter_spec morselfs_parameters[] = {
	fsparam_string("size", OPTION_SIZE),
	fsparam_u64("inodes", OPTION_INODES),
	fsparam_u32oct("mode", OPTION_MODE),
	fsparam_u32("uid", OPTION_UID),
	fsparam_u32("gid", OPTION_GID),
	fsparam_flag("format", OPTION_FORMAT),
	{}
};

/* Parses bytes with a suffix, or a share of the memory: "64g", "30%". */
static int morselfs_parse_size(struct fs_context *context, const char *text, u64 *pages)
{
	char *rest;
	u64 size = memparse(text, &rest);

	if (*rest == '%') {
		size = div_u64((u64)totalram_pages() * size, 100) << PAGE_SHIFT;
		rest++;
	}
	*pages = size >> PAGE_SHIFT;
	if (*rest || !*pages)
		return invalf(context, "morselfs: size=%s: must be bytes with a suffix, or N%%",
			      text);
	return 0;
}

static int morselfs_parse_owner(struct fs_context *context, struct morselfs_options *options,
				u32 number, bool is_group)
{
	options->uid = is_group ? options->uid : make_kuid(current_user_ns(), number);
	options->gid = is_group ? make_kgid(current_user_ns(), number) : options->gid;
	return uid_valid(options->uid) && gid_valid(options->gid) ? 0 :
	       invalf(context, "morselfs: the user namespace has no ID %u", number);
}

static int morselfs_parse_param(struct fs_context *context, struct fs_parameter *parameter)
{
	struct morselfs_options *options = context->fs_private;
	struct fs_parse_result result;
	int which = fs_parse(context, morselfs_parameters, parameter, &result);

	if (which >= 0 && context->purpose == FS_CONTEXT_FOR_RECONFIGURE)
		return invalf(context, "morselfs: %s cannot change while mounted",
			      parameter->key);
	switch (which) {
	case OPTION_SIZE:
		return morselfs_parse_size(context, parameter->string, &options->max_pages);
	case OPTION_INODES:
		options->max_inodes = result.uint_64;
		return 0;
	case OPTION_MODE:
		options->mode = result.uint_32 & 07777;
		return 0;
	case OPTION_UID:
	case OPTION_GID:
		return morselfs_parse_owner(context, options, result.uint_32, which == OPTION_GID);
	case OPTION_FORMAT:
		options->format = true;
		return 0;
	}
	return which;
}

/* Makes the inode and the name of a slot that the device has. */
static int morselfs_show_slot(struct super_block *super, struct morsel_slot *slot)
{
	struct qstr name = QSTR_INIT(slot->name, strlen(slot->name));
	struct dentry *entry = d_hash_and_lookup(super->s_root, &name);
	struct inode *inode;

	if (entry) {
		dput(entry);
		pr_err("morselfs: the device has the name '%s' twice\n", slot->name);
		return -EUCLEAN;
	}
	entry = d_alloc_name(super->s_root, slot->name);
	if (!entry)
		return -ENOMEM;
	inode = morselfs_make_inode(super, NULL, slot->mode);
	if (IS_ERR(inode)) {
		dput(entry);
		return PTR_ERR(inode);
	}
	i_uid_write(inode, slot->uid);
	i_gid_write(inode, slot->gid);
	morsel_adopt(morsel_of(inode), slot);
	d_add(entry, inode);
	return 0;
}

/*
 * Releases the tables of these slots, from the first one on. They have no inode that would do it.
 */
static void morselfs_forget_slots(struct morsel_device *device, struct morsel_slot *slot)
{
	struct morsel_slot *end = device->slots + device->super->slots;

	for (; slot < end; slot++)
		if (slot->is_used && slot->root)
			morsel_device_forget_tables(device, slot);
}

static int morselfs_show_slots(struct super_block *super, struct morsel_device *device)
{
	struct morsel_slot *slot = device->slots, *end = slot + device->super->slots;
	int error = 0;

	for (; slot < end; slot++) {
		error = slot->is_used ? morselfs_show_slot(super, slot) : 0;
		if (error) {
			morselfs_forget_slots(device, slot);
			break;
		}
	}
	return error;
}

static int morselfs_open_device(struct super_block *super, const char *path, bool format)
{
	struct morselfs *morsels = morselfs_of(super);
	struct morsel_device *device = morsel_device_open(path, format);

	if (IS_ERR(device))
		return PTR_ERR(device);
	morsels->device = device;
	morsels->max_pages = device->pages - device->first;
	morsels->max_inodes = device->super->slots;
	atomic64_set(&morsels->pages, morsel_device_used(device));
	return 0;
}

static int morselfs_fill_super(struct super_block *super, struct fs_context *context)
{
	const struct morselfs_options *options = context->fs_private;
	struct morselfs *morsels = kzalloc(sizeof(*morsels), GFP_KERNEL);
	struct inode *root;
	int error = 0;

	if (!morsels)
		return -ENOMEM;
	init_rwsem(&morsels->charging);
	morsels->max_pages = options->max_pages;
	morsels->max_inodes = options->max_inodes;
	super->s_fs_info = morsels;
	super->s_magic = VELLUM_MORSEL_MAGIC;
	super->s_op = &morselfs_super_ops;
	super->s_maxbytes = MAX_LFS_FILESIZE;
	super->s_blocksize = PAGE_SIZE;
	super->s_blocksize_bits = PAGE_SHIFT;
	super->s_time_gran = 1;
	super->s_iflags |= SB_I_NOEXEC | SB_I_NODEV;
	/* A path names a device with persistent memory. Any other source is but a word. */
	if (context->source && context->source[0] == '/')
		error = morselfs_open_device(super, context->source, options->format);
	if (error)
		return error;
	root = morselfs_make_inode(super, NULL, S_IFDIR | options->mode);
	if (!IS_ERR(root)) {
		root->i_uid = options->uid;
		root->i_gid = options->gid;
		super->s_root = d_make_root(root);
	}
	if (!super->s_root) {
		if (morsels->device)
			morselfs_forget_slots(morsels->device, morsels->device->slots);
		return IS_ERR(root) ? PTR_ERR(root) : -ENOMEM;
	}
	return morsels->device ? morselfs_show_slots(super, morsels->device) : 0;
}

static int morselfs_get_tree(struct fs_context *context)
{
	return get_tree_nodev(context, morselfs_fill_super);
}

static void morselfs_free_context(struct fs_context *context)
{
	kfree(context->fs_private);
}

static const struct fs_context_operations morselfs_context_ops = {
	.parse_param = morselfs_parse_param,
	.get_tree = morselfs_get_tree,
	.free = morselfs_free_context,
};

static int morselfs_init_fs_context(struct fs_context *context)
{
	struct morselfs_options *options = kzalloc(sizeof(*options), GFP_KERNEL);

	if (!options)
		return -ENOMEM;
	options->max_pages = totalram_pages() / 2;
	options->max_inodes = options->max_pages;
	options->mode = 0755;
	options->uid = current_fsuid();
	options->gid = current_fsgid();
	context->fs_private = options;
	context->ops = &morselfs_context_ops;
	return 0;
}

static void morselfs_kill_sb(struct super_block *super)
{
	struct morselfs *morsels = morselfs_of(super);

	kill_litter_super(super);
	if (morsels && morsels->device)
		morsel_device_close(morsels->device);
	kfree(morsels);
}

static struct file_system_type morselfs_type = {
	.owner = THIS_MODULE,
	.name = "morselfs",
	.init_fs_context = morselfs_init_fs_context,
	.parameters = morselfs_parameters,
	.kill_sb = morselfs_kill_sb,
};
MODULE_ALIAS_FS("morselfs");

static void morselfs_init_once(void *memory)
{
	inode_init_once(&((struct morsel *)memory)->inode);
}

int morsel_init(struct dentry *folder)
{
	int error = -ENOMEM;

	morselfs_inode_cache = kmem_cache_create("vellum_morsel", sizeof(struct morsel), 0,
						 SLAB_ACCOUNT | SLAB_RECLAIM_ACCOUNT,
						 morselfs_init_once);
	if (!morselfs_inode_cache)
		return error;
	error = morsel_fill_init();
	if (error)
		goto no_fills;
	error = register_filesystem(&morselfs_type);
	if (error)
		goto no_type;
	morsel_check_init(folder);
	return 0;
no_type:
	morsel_fill_exit();
no_fills:
	kmem_cache_destroy(morselfs_inode_cache);
	return error;
}

void morsel_exit(void)
{
	unregister_filesystem(&morselfs_type);
	morsel_fill_exit();
	/* RCU frees the inodes. */
	rcu_barrier();
	kmem_cache_destroy(morselfs_inode_cache);
}
