// SPDX-License-Identifier: GPL-2.0
/* The device: one open is one exmap. include/uapi/vellum/exmap.h says what it promises. */

#include <linux/anon_inodes.h>
#include <linux/capability.h>
#include <linux/file.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>

#include "core/compat.h"
#include "core/pt_pieces.h"
#include "core/sized.h"
#include "core/storage.h"
#include "exmap/exmap.h"

static struct exmap *exmap_make(void)
{
	struct exmap *exmap = kzalloc(sizeof(*exmap), GFP_KERNEL_ACCOUNT);

	if (!exmap)
		return NULL;
	kref_init(&exmap->references);
	mutex_init(&exmap->setup);
	mutex_init(&exmap->sizing);
	init_rwsem(&exmap->walking);
	pt_mount_init(&exmap->mount, &exmap->tree);
	xa_init(&exmap->shown);
	exmap_register(exmap);
	return exmap;
}

static void exmap_free_interfaces(struct exmap_interface *interface, unsigned int count)
{
	unsigned int i;

	for (i = 0; i < count; i++) {
		free_page((unsigned long)interface[i].vector);
		kvfree(interface[i].ranges);
		kvfree(interface[i].results);
		kvfree(interface[i].leaving);
		kfree(interface[i].batch);
	}
	kvfree(interface);
}

static struct exmap_interface *exmap_make_interfaces(unsigned int count)
{
	struct exmap_interface *interface = kvcalloc(count, sizeof(*interface), GFP_KERNEL_ACCOUNT);
	unsigned int i;

	for (i = 0; interface && i < count; i++) {
		struct exmap_interface *one = &interface[i];

		mutex_init(&one->lock);
		init_llist_head(&one->finished);
		INIT_WORK(&one->concluding, exmap_conclude);
		one->vector = (u64 *)get_zeroed_page(GFP_KERNEL_ACCOUNT);
		one->ranges = kvcalloc(VELLUM_EXMAP_VECTOR_ENTRIES, sizeof(*one->ranges),
				       GFP_KERNEL_ACCOUNT);
		one->results = kvcalloc(VELLUM_EXMAP_VECTOR_ENTRIES, sizeof(*one->results),
					GFP_KERNEL_ACCOUNT);
		one->leaving = kvcalloc(FRAME_BUNDLE, sizeof(*one->leaving), GFP_KERNEL_ACCOUNT);
		if (!one->vector || !one->ranges || !one->results || !one->leaving) {
			exmap_free_interfaces(interface, count);
			return NULL;
		}
	}
	return interface;
}

static void exmap_destroy(struct kref *references)
{
	struct exmap *exmap = container_of(references, struct exmap, references);

	exmap_unregister(exmap);
	if (exmap->work)
		destroy_workqueue(exmap->work);
	exmap_surface_destroy(exmap);
	frame_pool_destroy(&exmap->pool);
	if (exmap->interface)
		exmap_free_interfaces(exmap->interface, exmap->interfaces);
	if (exmap->backing)
		fput(exmap->backing);
	exmap_uncharge(exmap, exmap->charged);
	if (exmap->user)
		free_uid(exmap->user);
	mutex_destroy(&exmap->sizing);
	mutex_destroy(&exmap->setup);
	kfree(exmap);
}

void exmap_put(struct exmap *exmap)
{
	kref_put(&exmap->references, exmap_destroy);
}

/* The file that pages are read from and written to; NULL for none. */
static struct file *exmap_backing_file(int descriptor)
{
	struct file *file;

	if (descriptor == -1)
		return NULL;
	file = fget(descriptor);
	if (!file)
		return ERR_PTR(-EBADF);
	if ((file->f_mode & FMODE_READ) && vellum_file_has_storage(file))
		return file;
	fput(file);
	return ERR_PTR(-EBADF);
}

static int exmap_create_locked(struct exmap *exmap, const struct vellum_exmap_create *create,
			       struct file *backing, struct workqueue_struct *work)
{
	struct exmap_interface *interface;
	int error;

	if (exmap->interface)
		return -EBUSY;
	/* Only a pinnable surface may be mapped before creation. */
	if (exmap->tree.root && !(create->flags & VELLUM_EXMAP_PINNABLE))
		return -EBUSY;
	interface = exmap_make_interfaces(create->interfaces);
	error = interface ? exmap_make_pool(exmap, create) : -ENOMEM;
	if (error) {
		if (interface)
			exmap_free_interfaces(interface, create->interfaces);
		return error;
	}
	exmap->flags = create->flags;
	exmap->interfaces = create->interfaces;
	exmap->backing = backing;
	exmap->work = work;
	/* Pairs with the acquire in exmap_is_created(). Commands use the exmap from here on. */
	smp_store_release(&exmap->interface, interface);
	return 0;
}

/* Gives the exmap its pool and its interfaces. */
int exmap_create(struct exmap *exmap, const struct vellum_exmap_create *create)
{
	struct workqueue_struct *work = NULL;
	struct file *backing;
	int error = -ENOMEM;

	if (create->flags & ~(u64)EXMAP_FLAGS || !create->interfaces ||
	    create->interfaces > VELLUM_EXMAP_MAX_INTERFACES || !create->frames ||
	    !exmap_huge_is_right(create))
		return -EINVAL;
	backing = exmap_backing_file(create->backing);
	if (IS_ERR(backing))
		return PTR_ERR(backing);
	if (backing) {
		/*
		 * Allocated before `setup` is taken, which nests in the mmap lock: this waits for
		 * CPU hotplug.
		 */
		work = alloc_workqueue("exmap", WQ_UNBOUND | WQ_HIGHPRI, 0);
		if (!work)
			goto out;
	}
	error = -EINTR;
	if (!mutex_lock_killable(&exmap->setup)) {
		error = exmap_create_locked(exmap, create, backing, work);
		mutex_unlock(&exmap->setup);
	}
out:
	if (error && work)
		destroy_workqueue(work);
	if (error && backing)
		fput(backing);
	return error;
}

int exmap_lock_slowly(struct exmap *exmap, struct exmap_interface *interface, bool may_wait)
{
	int error = exmap_prune(exmap, may_wait);

	if (error)
		return error;
	if (!may_wait)
		return mutex_trylock(&interface->lock) ? 0 : -EAGAIN;
	return mutex_lock_killable(&interface->lock) ? -EINTR : 0;
}

/* The sizes that programs pass that were built for the first version of each structure. */
#define EXMAP_QUERY_SIZE_VER0		32
#define EXMAP_CREATE_SIZE_VER0	32
#define EXMAP_STAT_SIZE_VER0		120
#define EXMAP_HARVEST_SIZE_VER0	40
#define EXMAP_MOVE_SIZE_VER0		32

static long exmap_ioctl_query(unsigned long argument)
{
	struct vellum_exmap_query query;
	int size = vellum_copy_sized(&query, sizeof(query), EXMAP_QUERY_SIZE_VER0, argument);

	if (size < 0)
		return size;
	query = (struct vellum_exmap_query){
		.size = sizeof(query),
		.version = 1,
		.features = VELLUM_EXMAP_CAN_READ | VELLUM_EXMAP_CAN_WRITE |
			    VELLUM_EXMAP_CAN_SHOW_TABLES,
		.flags = EXMAP_FLAGS,
		.max_interfaces = VELLUM_EXMAP_MAX_INTERFACES,
		.vector_entries = VELLUM_EXMAP_VECTOR_ENTRIES,
	};
	return vellum_answer_sized(argument, size, &query, sizeof(query));
}

static long exmap_ioctl_create(struct exmap *exmap, unsigned long argument)
{
	struct vellum_exmap_create create;
	int size = vellum_copy_sized(&create, sizeof(create), EXMAP_CREATE_SIZE_VER0, argument);

	return size < 0 ? size : exmap_create(exmap, &create);
}

static long exmap_ioctl_stat(struct exmap *exmap, unsigned long argument)
{
	struct vellum_exmap_stat stat;
	int size = vellum_copy_sized(&stat, sizeof(stat), EXMAP_STAT_SIZE_VER0, argument);
	unsigned int i;

	if (size < 0)
		return size;
	if (!exmap_is_created(exmap))
		return -ENODEV;
	stat = (struct vellum_exmap_stat){
		.size = sizeof(stat),
		.interfaces = exmap->interfaces,
		.frames = exmap->pool.frames,
		.resident = frame_pool_resident(&exmap->pool),
		.surface = READ_ONCE(exmap->tree.pages),
		.tables = atomic_long_read(&exmap->tree.tables),
		.attached = READ_ONCE(exmap->mount.attaches),
		.detached = READ_ONCE(exmap->mount.detaches),
		.read = atomic64_read(&exmap->read_quickly),
		.blocks = exmap->pool.block_count,
		.blocks_free = READ_ONCE(exmap->pool.blocks_free),
		.huge = atomic_long_read(&exmap->tree.huge),
		.splits = atomic_long_read(&exmap->tree.splits),
	};
	for (i = 0; i < exmap->interfaces; i++) {
		const struct exmap_interface *interface = &exmap->interface[i];
		const struct frame_lane *lane = &exmap->pool.lanes[i];

		stat.allocated += READ_ONCE(lane->taken);
		stat.freed += READ_ONCE(lane->given);
		stat.refills += READ_ONCE(lane->refills);
		stat.conflicts += READ_ONCE(interface->conflicts);
		stat.busy += READ_ONCE(interface->busy);
		stat.flushes += READ_ONCE(interface->flushes);
		stat.read += READ_ONCE(interface->read);
		stat.written += READ_ONCE(interface->written);
	}
	return vellum_answer_sized(argument, size, &stat, sizeof(stat));
}

static long exmap_ioctl_vector(struct exmap *exmap, unsigned int command, unsigned long argument)
{
	if (argument >> 32)
		return -EINVAL;
	return exmap_vector(exmap, command, argument & 0xffff, argument >> 16, false);
}

static long exmap_ioctl_harvest(struct exmap *exmap, unsigned long argument)
{
	struct vellum_exmap_harvest harvest;
	int size = vellum_copy_sized(&harvest, sizeof(harvest), EXMAP_HARVEST_SIZE_VER0, argument);

	return size < 0 ? size : exmap_harvest(exmap, &harvest);
}

static long exmap_ioctl_move(struct exmap *exmap, unsigned long argument)
{
	struct vellum_exmap_move move;
	int size = vellum_copy_sized(&move, sizeof(move), EXMAP_MOVE_SIZE_VER0, argument);

	return size < 0 ? size : exmap_move(exmap, &move);
}

static struct exmap_handle *exmap_make_handle(struct exmap *exmap)
{
	struct exmap_handle *handle = kzalloc(sizeof(*handle), GFP_KERNEL_ACCOUNT);

	if (handle) {
		handle->own = exmap;
		handle->exmap = exmap;
	}
	return handle;
}

/* Lets pread and pwrite work, and lets io_uring start reads without a thread of its own. */
static void exmap_set_modes(struct file *file)
{
	file->f_mode |= FMODE_PREAD | FMODE_PWRITE | FMODE_NOWAIT;
}

/* Returns another descriptor for the same exmap. */
static long exmap_clone(struct exmap *exmap)
{
	struct exmap_handle *handle = exmap_make_handle(exmap);
	struct file *file;
	int descriptor;

	if (!handle)
		return -ENOMEM;
	descriptor = get_unused_fd_flags(O_CLOEXEC);
	if (descriptor < 0) {
		kfree(handle);
		return descriptor;
	}
	file = anon_inode_getfile("[exmap]", &exmap_operations, handle, O_RDWR);
	if (IS_ERR(file)) {
		put_unused_fd(descriptor);
		kfree(handle);
		return PTR_ERR(file);
	}
	exmap_set_modes(file);
	kref_get(&exmap->references);
	fd_install(descriptor, file);
	return descriptor;
}

/*
 * Makes a descriptor one for another's exmap, once, and only if its own exmap was not used. The own
 * exmap stays until the descriptor is closed, as other threads may be reading it.
 */
int exmap_become_clone(struct file *file, struct file *other)
{
	struct exmap_handle *handle = file->private_data;
	struct exmap *own = handle->own, *exmap;

	if (other->f_op != &exmap_operations)
		return -EINVAL;
	exmap = exmap_of(other);
	if (exmap == own || own->tree.root || exmap_is_created(own))
		return -EINVAL;
	kref_get(&exmap->references);
	if (cmpxchg(&handle->exmap, own, exmap) != own) {
		exmap_put(exmap);
		return -EBUSY;
	}
	return 0;
}

static noinline long exmap_own_ioctl(struct exmap *exmap, unsigned int command,
				     unsigned long argument)
{
	switch (command) {
	case VELLUM_EXMAP_ALLOC:
	case VELLUM_EXMAP_FREE:
	case VELLUM_EXMAP_READ:
	case VELLUM_EXMAP_WRITE:
		return exmap_ioctl_vector(exmap, command, argument);
	case VELLUM_EXMAP_RESIZE:
		return exmap_resize(exmap, argument);
	case VELLUM_EXMAP_CLONE:
		return argument ? -EINVAL : exmap_clone(exmap);
	}
	switch (vellum_sized_command(command)) {
	case vellum_sized_command(VELLUM_EXMAP_QUERY):
		return exmap_ioctl_query(argument);
	case vellum_sized_command(VELLUM_EXMAP_CREATE):
		return exmap_ioctl_create(exmap, argument);
	case vellum_sized_command(VELLUM_EXMAP_STAT):
		return exmap_ioctl_stat(exmap, argument);
	case vellum_sized_command(VELLUM_EXMAP_HARVEST):
		return exmap_ioctl_harvest(exmap, argument);
	case vellum_sized_command(VELLUM_EXMAP_MOVE):
		return exmap_ioctl_move(exmap, argument);
	}
	return -ENOTTY;
}

static long exmap_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct exmap *exmap = exmap_of(file);

	if (exmap_published_knows(command))
		return exmap_published_ioctl(exmap, file, command, argument);
	return exmap_own_ioctl(exmap, command, argument);
}

static int exmap_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct exmap *exmap = exmap_of(file);
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 first = VELLUM_EXMAP_OFFSET_INTERFACE(0);

	if (offset == VELLUM_EXMAP_OFFSET_SURFACE)
		return exmap_map_surface(exmap, vma);
	if (offset == VELLUM_EXMAP_OFFSET_TABLES)
		return exmap_map_tables(exmap, vma);
	if (offset >= first)
		return exmap_map_vector(exmap, vma, (offset - first) >> PAGE_SHIFT);
	return -EINVAL;
}

static unsigned long exmap_get_unmapped_area(struct file *file, unsigned long addr,
					     unsigned long len, unsigned long pgoff,
					     unsigned long flags)
{
	if (!pgoff)
		return pt_pieces_area(file, addr, len, pgoff, flags);
	return pt_get_unmapped_area(file, addr, len, pgoff, flags);
}

static int exmap_open(struct inode *inode, struct file *file)
{
	struct exmap *exmap = exmap_make();

	if (!exmap)
		return -ENOMEM;
	file->private_data = exmap_make_handle(exmap);
	if (!file->private_data) {
		exmap_put(exmap);
		return -ENOMEM;
	}
	exmap_set_modes(file);
	return 0;
}

static int exmap_release(struct inode *inode, struct file *file)
{
	struct exmap_handle *handle = file->private_data;

	if (handle->own != handle->exmap)
		exmap_put(handle->own);
	exmap_put(handle->exmap);
	kfree(handle);
	return 0;
}

const struct file_operations exmap_operations = {
	.owner = THIS_MODULE,
	.open = exmap_open,
	.release = exmap_release,
	.read_iter = exmap_read_iter,
	.write_iter = exmap_write_iter,
	.uring_cmd = exmap_uring_cmd,
	.unlocked_ioctl = exmap_ioctl,
	.mmap = exmap_mmap,
	.get_unmapped_area = exmap_get_unmapped_area,
	.llseek = noop_llseek,
};

static struct miscdevice exmap_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "exmap",
	.fops = &exmap_operations,
	.mode = 0600,
};

struct workqueue_struct *exmap_work;

int exmap_init(struct dentry *folder)
{
	int error = -ENOMEM;

	exmap_work = alloc_workqueue("exmap", WQ_UNBOUND, 0);
	if (!exmap_work)
		return error;
	error = exmap_shrinker_init();
	if (error)
		goto no_shrinker;
	exmap_check_init(folder);
	/* Programs may open it before this returns. */
	error = misc_register(&exmap_device);
	if (error)
		goto no_device;
	return 0;
no_device:
	exmap_shrinker_exit();
no_shrinker:
	destroy_workqueue(exmap_work);
	return error;
}

void exmap_exit(void)
{
	misc_deregister(&exmap_device);
	exmap_shrinker_exit();
	destroy_workqueue(exmap_work);
}
