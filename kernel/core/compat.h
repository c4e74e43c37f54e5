/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The differences between the kernels that the module is built for. All of them are in this file,
 * so the rest of the module has no #if on versions.
 */
#ifndef VELLUM_COMPAT_H
#define VELLUM_COMPAT_H

#include <linux/blkdev.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/shrinker.h>
#include <linux/uio.h>
#include <linux/userfaultfd_k.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
#include <linux/io_uring/cmd.h>
#else
#include <linux/io_uring.h>
#endif

#ifndef CONFIG_X86_64
#error "vellum: page tables are written for x86-64"
#endif

/*
 * Sets up the lock in the table's struct page, and the count of tables. The core takes that lock
 * and keeps that count. The entries of a table of level 1 are pages.
 */
static inline bool pt_table_construct(struct page *page, unsigned int level)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	switch (level) {
	case PG_LEVEL_4K:
		return pagetable_pte_ctor(page_ptdesc(page));
	case PG_LEVEL_2M:
		return pagetable_pmd_ctor(page_ptdesc(page));
	case PG_LEVEL_1G:
		/*
		 * Without this a table of level 3 is a page in a bad state when the core frees it.
		 */
		pagetable_pud_ctor(page_ptdesc(page));
		return true;
	}
#else
	switch (level) {
	case PG_LEVEL_4K:
		return pgtable_pte_page_ctor(page);
	case PG_LEVEL_2M:
		return pgtable_pmd_page_ctor(page);
	}
#endif
	return true;
}

static inline void pt_table_destruct(struct page *page, unsigned int level)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	switch (level) {
	case PG_LEVEL_4K:
		pagetable_pte_dtor(page_ptdesc(page));
		break;
	case PG_LEVEL_2M:
		pagetable_pmd_dtor(page_ptdesc(page));
		break;
	case PG_LEVEL_1G:
		pagetable_pud_dtor(page_ptdesc(page));
		break;
	}
#else
	switch (level) {
	case PG_LEVEL_4K:
		pgtable_pte_page_dtor(page);
		break;
	case PG_LEVEL_2M:
		pgtable_pmd_page_dtor(page);
		break;
	}
#endif
	/*
	 * The kernel's allocator hands out pages without a lock in them. A device's pages are
	 * reused as they are.
	 */
	set_page_private(page, 0);
}

/* The lock of the table that holds the entry. */
static inline spinlock_t *pt_table_lock(void *entry)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	return ptlock_ptr(virt_to_ptdesc(entry));
#else
	return ptlock_ptr(virt_to_page(entry));
#endif
}

static inline void pt_vma_change_flags(struct vm_area_struct *vma, unsigned long set,
				       unsigned long clear)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_mod(vma, set, clear);
#else
	vma->vm_flags = (vma->vm_flags | set) & ~clear;
#endif
}

/* Makes faults that hold only the VMA's own lock wait until the caller releases the mmap lock. */
static inline void pt_vma_start_write(struct vm_area_struct *vma)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	vma_start_write(vma);
#endif
}

/* Sets the flags of a VMA that is in no address space. */
static inline void pt_vma_init_flags(struct vm_area_struct *vma, unsigned long flags)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_init(vma, flags);
#else
	vma->vm_flags = flags;
#endif
}

/* Whether userfaultfd accepts mappings of more than ordinary memory. */
static inline bool pt_userfault_takes_all(void)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
	static const struct vm_operations_struct operations = {};
	struct vm_area_struct vma = { .vm_ops = &operations };

	pt_vma_init_flags(&vma, VM_SHARED | VM_PFNMAP | VM_IO);
	return vma_can_userfault(&vma, VM_UFFD_WP, true);
#else
	return false;
#endif
}

static inline unsigned long pt_get_unmapped_area(struct file *file, unsigned long addr,
						 unsigned long len, unsigned long pgoff,
						 unsigned long flags)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
	return mm_get_unmapped_area(current->mm, file, addr, len, pgoff, flags);
#else
	return current->mm->get_unmapped_area(file, addr, len, pgoff, flags);
#endif
}

/*
 * The flag of a 2 MiB leaf that nothing may pin: the core's fast path to pages refuses it. Some
 * kernels have no such bit for 2 MiB leaves. There the core takes the leaf for a device's memory,
 * and finds no device that owns it.
 */
#ifdef CONFIG_ARCH_SUPPORTS_PMD_PFNMAP
#define PT_HUGE_UNPINNABLE	_PAGE_SPECIAL
#else
#define PT_HUGE_UNPINNABLE	_PAGE_DEVMAP
#endif

/*
 * Whether a 2 MiB leaf may be put into an entry of level 2 a second time while faults read the
 * entry. Before 6.5 a fault reads the entry so often that it may find none, a leaf, none, and a
 * leaf. It then takes the entry for a damaged table and clears it.
 */
#define PT_HUGE_MAY_RETURN	(LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0))

/*
 * Before 6.5 the core reads an entry of level 2 once, and then again for the table. A leaf that
 * comes in between would be walked like a table. So the caller keeps faults out, as the core does
 * for its own huge pages. Later kernels read the entry once.
 */
static inline bool pt_keep_faults_out(struct mm_struct *mm)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
	/* Tells lockdep the order of locks that the other kernels have. */
	might_lock(&mm->mmap_lock);
	return true;
#else
	return !mmap_write_lock_killable(mm);
#endif
}

static inline void pt_let_faults_in(struct mm_struct *mm)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 5, 0)
	mmap_write_unlock(mm);
#endif
}

/*
 * Whether a fault reads an entry of level 2 again after it has found a table there. Between the two
 * the entry may then change to another table, but not to none.
 */
#define PT_FAULT_READS_TWICE	(LINUX_VERSION_CODE < KERNEL_VERSION(6, 5, 0))

/*
 * Calls the function when no thread walks any more what page tables lead to no longer. Before 6.5 a
 * fault walks a table of level 1 without RCU: it does not sleep, but an interrupt may delay it.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
#define pt_call_after_walks	call_rcu
#define pt_wait_for_walks	rcu_barrier
#else
#define pt_call_after_walks	call_rcu_tasks
#define pt_wait_for_walks	rcu_barrier_tasks
#endif

/*
 * Whether the flush of a process' TLBs tells the devices that share its page tables (SVA), and
 * nothing else does. On older kernels the notifiers of secondary MMUs tell them.
 */
static inline bool pt_flush_tells_devices(void)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	return IS_ENABLED(CONFIG_IOMMU_SVA);
#else
	return false;
#endif
}

/*
 * Calls the kernel's own function that ends an invalidation of secondary MMUs. The module finds
 * that function by its name.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
static inline void pt_secondary_no_end(struct mmu_notifier_range *range)
{
}

#define pt_secondary_end(call, range)	static_call(call)(range)
#else
static inline void pt_secondary_no_end(struct mmu_notifier_range *range, bool only_end)
{
}

#define pt_secondary_end(call, range)	static_call(call)(range, false)
#endif

/* The address and the length of the user memory of an iterator's next segment. */
static inline void __user *vellum_iter_address(const struct iov_iter *iter)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	return iter_iov_addr(iter);
#else
	return (iter_is_ubuf(iter) ? iter->ubuf : iter->iov->iov_base) + iter->iov_offset;
#endif
}

static inline size_t vellum_iter_length(const struct iov_iter *iter)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	return iter_iov_len(iter);
#else
	if (iter_is_ubuf(iter))
		return iov_iter_count(iter);
	return min(iter->iov->iov_len - iter->iov_offset, iov_iter_count(iter));
#endif
}

/* The payload of an io_uring command. */
static inline const void *vellum_uring_cmd_data(const struct io_uring_cmd *command)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	return io_uring_sqe_cmd(command->sqe);
#else
	return command->cmd;
#endif
}

/*
 * Registers a shrinker. Kernels that allocate shrinkers take three calls for that, others take one.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
static inline struct shrinker *vellum_shrinker_register(const char *name,
							const struct shrinker *like)
{
	struct shrinker *shrinker = shrinker_alloc(0, "%s", name);

	if (!shrinker)
		return NULL;
	shrinker->count_objects = like->count_objects;
	shrinker->scan_objects = like->scan_objects;
	shrinker->seeks = like->seeks;
	shrinker_register(shrinker);
	return shrinker;
}

static inline void vellum_shrinker_unregister(struct shrinker *shrinker)
{
	shrinker_free(shrinker);
}
#else
static inline struct shrinker *vellum_shrinker_register(const char *name, struct shrinker *like)
{
	return register_shrinker(like, "%s", name) ? NULL : like;
}

static inline void vellum_shrinker_unregister(struct shrinker *shrinker)
{
	unregister_shrinker(shrinker);
}
#endif

/*
 * The lowest limit in pages that memory cgroups set for what a page of the kernel's memory is
 * charged to, and a number of the cgroup that sets it. U64_MAX: none does.
 */
static inline u64 vellum_memory_limit(const void *memory, unsigned int *number)
{
	u64 lowest = U64_MAX;
#ifdef CONFIG_MEMCG
	struct mem_cgroup *group;
	unsigned long limit;

	rcu_read_lock();
	for (group = folio_memcg(virt_to_folio(memory)); group; group = parent_mem_cgroup(group)) {
		limit = min(READ_ONCE(group->memory.max), READ_ONCE(group->memory.high));
		if (limit < PAGE_COUNTER_MAX && limit <= lowest) {
			lowest = limit;
			*number = mem_cgroup_id(group);
		}
	}
	rcu_read_unlock();
#endif
	return lowest;
}

/* The memory cgroup that the page is charged to, with a reference; or NULL. */
static inline struct mem_cgroup *vellum_memory_group(const void *memory)
{
	struct mem_cgroup *group = NULL;

#ifdef CONFIG_MEMCG
	rcu_read_lock();
	/* A cgroup that ends hands its pages over to the one above it. */
	do {
		group = folio_memcg(virt_to_folio(memory));
	} while (group && !css_tryget(&group->css));
	rcu_read_unlock();
#endif
	return group;
}

/*
 * Starts a write that may go on after the call. The file system cannot be frozen before the write
 * ends. If the write goes on (EIOCBQUEUED), its completion calls kiocb_end_write().
 */
static inline ssize_t vellum_iocb_write(struct file *file, struct kiocb *kiocb,
					struct iov_iter *iter)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
	return vfs_iocb_iter_write(file, kiocb, iter);
#else
	ssize_t outcome;

	kiocb_start_write(kiocb);
	outcome = vfs_iocb_iter_write(file, kiocb, iter);
	if (outcome != -EIOCBQUEUED)
		kiocb_end_write(kiocb);
	return outcome;
#endif
}

/* A member of struct file_operations: mappings of the file may have MAP_SYNC. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
#define VELLUM_MAY_MAP_SYNC	.fop_flags = FOP_MMAP_SYNC
#else
#define VELLUM_MAY_MAP_SYNC	.mmap_supported_flags = MAP_SYNC
#endif

/* The mapping of owners through which a file system is seen. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
#define vellum_idmap	mnt_idmap
#define VELLUM_NOP_IDMAP	(&nop_mnt_idmap)
#define vellum_file_idmap(file)	file_mnt_idmap(file)
#else
#define vellum_idmap	user_namespace
#define VELLUM_NOP_IDMAP	(&init_user_ns)
#define vellum_file_idmap(file)	file_mnt_user_ns(file)
#endif

static inline void vellum_inode_init_times(struct inode *inode)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
	simple_inode_init_ts(inode);
#else
	inode->i_ctime = current_time(inode);
	inode->i_mtime = inode->i_ctime;
	inode->i_atime = inode->i_ctime;
#endif
}

/* Updates the times of a directory whose entries have changed. */
static inline void vellum_inode_touch(struct inode *inode)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
	inode_set_mtime_to_ts(inode, inode_set_ctime_current(inode));
#else
	inode->i_ctime = current_time(inode);
	inode->i_mtime = inode->i_ctime;
#endif
}

static inline void vellum_fillattr(struct vellum_idmap *idmap, u32 mask, struct inode *inode,
				   struct kstat *stat)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
	generic_fillattr(idmap, mask, inode, stat);
#else
	generic_fillattr(idmap, inode, stat);
#endif
}

/* Splices by read_iter, into pages that the pipe then owns. */
static inline ssize_t vellum_splice_read(struct file *file, loff_t *position,
					 struct pipe_inode_info *pipe, size_t count,
					 unsigned int flags)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 5, 0)
	return copy_splice_read(file, position, pipe, count, flags);
#else
	return generic_file_splice_read(file, position, pipe, count, flags);
#endif
}

/* A block device that the module has opened exclusively. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0)
#define vellum_bdev	file

static inline struct vellum_bdev *vellum_bdev_open(const char *path, void *holder)
{
	return bdev_file_open_by_path(path, BLK_OPEN_READ | BLK_OPEN_WRITE, holder, NULL);
}

static inline struct block_device *vellum_bdev_get(struct vellum_bdev *bdev)
{
	return file_bdev(bdev);
}

static inline void vellum_bdev_close(struct vellum_bdev *bdev)
{
	fput(bdev);
}
#else
#define vellum_bdev	block_device

static inline struct vellum_bdev *vellum_bdev_open(const char *path, void *holder)
{
	return blkdev_get_by_path(path, FMODE_READ | FMODE_WRITE | FMODE_EXCL, holder);
}

static inline struct block_device *vellum_bdev_get(struct vellum_bdev *bdev)
{
	return bdev;
}

static inline void vellum_bdev_close(struct vellum_bdev *bdev)
{
	blkdev_put(bdev, FMODE_READ | FMODE_WRITE | FMODE_EXCL);
}
#endif

#endif /* VELLUM_COMPAT_H */
